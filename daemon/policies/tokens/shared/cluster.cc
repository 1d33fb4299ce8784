#include "daemon/policies/tokens/shared/cluster.h"

#include <algorithm>
#include <cmath>

namespace tessera::policies {
namespace {

constexpr std::uint32_t kNone = ~std::uint32_t{0};

// Returns the number of clusters. `row_of(i)` gives the cosines of entry i with all later entries.
template <typename RowOf>
absl::StatusOr<std::uint64_t> Cluster(std::uint64_t count, double tau, const RowOf& row_of,
                                      std::span<std::uint32_t> seed_of) {
  std::fill_n(seed_of.begin(), count, kNone);
  std::uint64_t clusters = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    if (seed_of[i] != kNone) continue;
    ++clusters;
    seed_of[i] = i;
    const absl::StatusOr<std::span<const double>> row = row_of(i);
    if (!row.ok()) return row.status();
    for (std::uint32_t j = i + 1; j < count; ++j) {
      if (seed_of[j] == kNone && (*row)[j - i - 1] > tau) seed_of[j] = i;
    }
  }
  return clusters;
}

}  // namespace

absl::StatusOr<KeyCosines> KeyCosines::Of(KeyScorer& scorer, std::vector<std::uint32_t> kv_heads,
                                          std::uint64_t entries) {
  KeyCosines cosines(scorer, std::move(kv_heads), entries);
  for (const std::uint32_t kv_head : cosines.kv_heads_) {
    absl::Status status = scorer.AddSquaredLengths(kv_head, cosines.lengths_);
    if (!status.ok()) return status;
  }
  for (double& length : cosines.lengths_) length = std::sqrt(length);
  return cosines;
}

absl::StatusOr<std::span<const double>> KeyCosines::Row(std::uint64_t i, std::uint64_t end) {
  if (end != end_ || i < first_ || i - first_ >= rows_.size()) {
    if (absl::Status status = Compute(i, end); !status.ok()) return status;
  }
  return std::span<const double>(rows_[i - first_]);
}

absl::Status KeyCosines::Compute(std::uint64_t i, std::uint64_t end) {
  const std::uint64_t count = std::min<std::uint64_t>(scorer_->observations_per_call(), end - i);
  first_ = i;
  end_ = end;
  rows_.resize(count);
  looks_.resize(count);
  for (std::uint64_t r = 0; r < count; ++r) {
    const std::uint64_t behind = end - (i + r) - 1;
    rows_[r].assign(behind, 0);
    looks_[r] = {.key = i + r,
                 .first = i + r + 1,
                 .visible = kernels::FullRanges(1, behind),
                 .logits = true,
                 .sums = rows_[r]};
  }
  for (const std::uint32_t kv_head : kv_heads_) {
    absl::Status status = scorer_->Look(kv_head, looks_);
    if (status.ok()) continue;
    rows_.clear();
    return status;
  }
  for (std::uint64_t r = 0; r < count; ++r) {
    for (std::uint64_t j = 0; j < rows_[r].size(); ++j) {
      double& cosine = rows_[r][j];
      const double lengths = lengths_[i + r] * lengths_[i + r + 1 + j];
      cosine = lengths > 0 ? std::clamp(cosine / lengths, -1.0, 1.0) : 0;
    }
  }
  return absl::OkStatus();
}

absl::Status ClusterRun(KeyCosines& cosines, std::uint64_t begin, std::uint64_t end, double tau,
                        std::span<std::uint32_t> seed_of) {
  const auto row_of = [&](std::uint32_t i) { return cosines.Row(begin + i, end); };
  const absl::StatusOr<std::uint64_t> clusters = Cluster(end - begin, tau, row_of, seed_of);
  if (!clusters.ok()) return clusters.status();
  for (std::uint64_t i = 0; i < end - begin; ++i) {
    seed_of[i] += static_cast<std::uint32_t>(begin);
  }
  return absl::OkStatus();
}

absl::Status ClusterCounts::AddRun(KeyCosines& cosines, std::uint64_t begin, std::uint64_t end) {
  std::vector<std::vector<double>> rows;
  for (std::uint64_t i = begin; i < end; ++i) {
    const absl::StatusOr<std::span<const double>> row = cosines.Row(i, end);
    if (!row.ok()) return row.status();
    rows.emplace_back(row->begin(), row->end());
  }
  const auto row_of = [&](std::uint32_t i) -> absl::StatusOr<std::span<const double>> {
    return std::span<const double>(rows[i]);
  };
  std::vector<std::uint32_t> seed_of(end - begin);
  for (std::uint32_t step = 0; step <= kTauSteps; ++step) {
    const double tau = static_cast<double>(step) / kTauSteps;
    const absl::StatusOr<std::uint64_t> clusters = Cluster(end - begin, tau, row_of, seed_of);
    if (!clusters.ok()) return clusters.status();
    counts_[step] += *clusters;
  }
  return absl::OkStatus();
}

void ClusterCounts::AddSingle(std::uint64_t entries) {
  for (std::uint64_t& count : counts_) count += entries;
}

}  // namespace tessera::policies
