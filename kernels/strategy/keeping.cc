#include "kernels/strategy/keeping.h"

#include <bit>

#include "kernels/strategy/float_rows.h"
#include "kernels/strategy/largest.h"

namespace tessera::kernels {
namespace {

// Each rotated channel's share of the row's energy: fits fp32 for rows of any magnitude.
void SharesOf(const float* rotated, std::uint32_t channels, double energy, float* shares) {
  const double unit = 1 / energy;
  for (std::uint32_t c = 0; c < channels; ++c) {
    const double element = rotated[c];
    shares[c] = static_cast<float>(element * element * unit);
  }
}

template <std::uint32_t kGroup>
void SumGroups(const float* shares, std::uint32_t groups, std::int32_t* sums) {
  for (std::uint32_t g = 0; g < groups; ++g) {
    float sum = shares[g * kGroup];
    for (std::uint32_t i = 1; i < kGroup; ++i) sum += shares[g * kGroup + i];
    sums[g] = std::bit_cast<std::int32_t>(sum);
  }
}

// Chooses groups by their sum of squares, as `encode` does. Ties do not matter here.
double KeptShare(const float* shares, std::uint32_t channels, const Keeping& keeping) {
  float ordered[kLargestHeadDim];
  if (keeping.order != nullptr) {
    for (std::uint32_t c = 0; c < channels; ++c) ordered[c] = shares[(*keeping.order)[c]];
    shares = ordered;
  }
  const std::uint32_t groups = channels / keeping.group;
  std::int32_t sums[kLargestHeadDim];
  switch (keeping.group) {
    case 1:
      SumGroups<1>(shares, groups, sums);
      break;
    case 2:
      SumGroups<2>(shares, groups, sums);
      break;
    default:
      SumGroups<4>(shares, groups, sums);
      break;
  }
  return SumOfLargest({.bits = sums, .size = groups}, keeping.kept / keeping.group);
}

}  // namespace

std::vector<double> MeanLosses(const RowSpan& rows, std::span<const RowRange> ranges,
                               const StoredRotation& rotation, std::span<const Keeping> ways,
                               const Operations& operations) {
  std::vector<double> losses(ways.size());
  FloatRows wide;
  FloatRows rotated;
  float shares[kLargestHeadDim];
  std::uint64_t count = 0;
  for (const RowRange& range : ranges) {
    const RowSpan tile = rows.Slice(range.first, range.count);
    Widen(tile, operations, wide);
    Rotate(tile, rotation, operations, rotated);
    count += range.count;
    for (std::uint32_t r = 0; r < range.count; ++r) {
      const double energy = Energy(wide.row(r), rows.head_dim);
      if (energy == 0) continue;
      SharesOf(rotated.row(r), rotation.channels, energy, shares);
      for (std::size_t i = 0; i < ways.size(); ++i) {
        losses[i] += 1 - KeptShare(shares, rotation.channels, ways[i]);
      }
    }
  }
  for (double& loss : losses) loss = count == 0 ? 0 : loss / static_cast<double>(count);
  return losses;
}

}  // namespace tessera::kernels
