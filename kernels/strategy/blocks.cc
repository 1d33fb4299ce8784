#include "kernels/strategy/blocks.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "kernels/strategy/float_rows.h"
#include "kernels/strategy/sample.h"

namespace tessera::kernels {
namespace {

// sum |k - mean|^2 / sum |k|^2 = 1 - |sum k|^2 / (n sum |k|^2)
double VarianceOf(const FloatRows& keys, std::uint32_t first, std::uint32_t count,
                  std::uint32_t head_dim) {
  double sum[kLargestHeadDim] = {};
  double energy = 0;
  for (std::uint32_t r = first; r < first + count; ++r) {
    const float* const key = keys.row(r);
    for (std::uint32_t d = 0; d < head_dim; ++d) sum[d] += key[d];
    energy += Energy(key, head_dim);
  }
  if (energy == 0) return 0;
  double of_sum = 0;
  for (std::uint32_t d = 0; d < head_dim; ++d) of_sum += sum[d] * sum[d];
  return std::max(0.0, 1 - of_sum / (count * energy));
}

}  // namespace

double BlockVariance(const RowSpan& keys, std::uint32_t block, std::uint64_t sampled_rows,
                     const Operations& operations) {
  FloatRows wide;
  double variance = 0;
  std::uint64_t blocks = 0;
  for (const RowRange& range : Spread(TilesOf(keys.count), sampled_rows)) {
    Widen(keys.Slice(range.first, range.count), operations, wide);
    for (std::uint32_t first = 0; first < range.count; first += block, ++blocks) {
      variance += VarianceOf(wide, first, std::min(block, range.count - first), keys.head_dim);
    }
  }
  return variance / static_cast<double>(blocks);
}

BlockChoice ChooseBlock(const RowSpan& keys, const StrategyOptions& options,
                        const Operations& operations) {
  if (options.summary == Summary::kNone || options.blocks.empty()) return {};
  std::vector<std::uint32_t> blocks = options.blocks;
  std::sort(blocks.begin(), blocks.end(), std::greater<>());
  BlockChoice choice;
  for (const std::uint32_t block : blocks) {
    choice = {.block = block,
              .variance = BlockVariance(keys, block, options.sampled_rows, operations)};
    if (choice.variance <= options.block_variance) break;
  }
  return choice;
}

}  // namespace tessera::kernels
