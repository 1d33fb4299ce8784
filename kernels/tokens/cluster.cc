#include "kernels/tokens/cluster.h"

#include <algorithm>
#include <cmath>

#include "kernels/tokens/rows.h"

namespace tessera::kernels {
namespace {

constexpr std::uint32_t kNone = ~std::uint32_t{0};

// Where `row_of(i)` gives the cosines of entry i with those behind it, i from 0.
template <typename RowOf>
std::uint64_t Cluster(std::uint64_t count, double tau, const RowOf& row_of,
                      std::span<std::uint32_t> seed_of) {
  std::fill_n(seed_of.begin(), count, kNone);
  std::uint64_t clusters = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    if (seed_of[i] != kNone) continue;
    ++clusters;
    seed_of[i] = i;
    const std::span<const double> row = row_of(i);
    for (std::uint32_t j = i + 1; j < count; ++j) {
      if (seed_of[j] == kNone && row[j - i - 1] > tau) seed_of[j] = i;
    }
  }
  return clusters;
}

}  // namespace

KeyCosines::KeyCosines(const Operations& operations, const LayerGeometry& geometry,
                       std::span<const RowRange> lanes)
    : sums_(operations, geometry),
      lanes_(lanes.begin(), lanes.end()),
      row_bytes_(geometry.head_dim * ElementBytes(geometry.type)),
      lengths_(lanes.empty() ? 0 : lanes.front().count) {
  for (std::size_t i = 0; i < lengths_.size(); ++i) {
    for (const RowRange& lane : lanes_) {
      lengths_[i] += SquaredLength(lane.rows + i * row_bytes_, geometry.head_dim, geometry.type);
    }
    lengths_[i] = std::sqrt(lengths_[i]);
  }
}

std::span<const double> KeyCosines::Of(std::uint64_t i, std::uint64_t end) {
  const std::uint64_t behind = end - i - 1;
  row_.assign(behind, 0);
  const VisibleRanges all = FullRanges(1, behind);
  for (const RowRange& lane : lanes_) {
    const std::byte* const row = lane.rows + i * row_bytes_;
    sums_.AddLogits({row, 1}, {row + row_bytes_, behind}, all, row_);
  }
  for (std::uint64_t j = 0; j < behind; ++j) {
    const double lengths = lengths_[i] * lengths_[i + 1 + j];
    row_[j] = lengths > 0 ? std::clamp(row_[j] / lengths, -1.0, 1.0) : 0;
  }
  return row_;
}

void ClusterRun(KeyCosines& cosines, std::uint64_t begin, std::uint64_t end, double tau,
                std::span<std::uint32_t> seed_of) {
  Cluster(
      end - begin, tau, [&](std::uint32_t i) { return cosines.Of(begin + i, end); }, seed_of);
  for (std::uint64_t i = 0; i < end - begin; ++i) {
    seed_of[i] += static_cast<std::uint32_t>(begin);
  }
}

void ClusterCounts::AddRun(KeyCosines& cosines, std::uint64_t begin, std::uint64_t end) {
  std::vector<std::vector<double>> rows;
  for (std::uint64_t i = begin; i < end; ++i) {
    const std::span<const double> row = cosines.Of(i, end);
    rows.emplace_back(row.begin(), row.end());
  }
  std::vector<std::uint32_t> seed_of(end - begin);
  for (std::uint32_t step = 0; step <= kTauSteps; ++step) {
    counts_[step] += Cluster(
        end - begin, static_cast<double>(step) / kTauSteps,
        [&](std::uint32_t i) -> std::span<const double> { return rows[i]; }, seed_of);
  }
}

void ClusterCounts::AddSingle(std::uint64_t entries) {
  for (std::uint64_t& count : counts_) count += entries;
}

}  // namespace tessera::kernels
