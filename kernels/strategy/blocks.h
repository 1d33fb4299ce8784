// Chooses the block length: how many keys one mean key may summarize.
#pragma once

#include <cstdint>

#include "kernels/format/operations.h"
#include "kernels/strategy/moments.h"
#include "kernels/strategy/strategy.h"

namespace tessera::kernels {

struct BlockChoice {
  std::uint32_t block = 0;  // entries; 0: no summaries
  double variance = 0;      // mean of |k - mean|^2 / |k|^2
};
BlockChoice ChooseBlock(const RowSpan& keys, const StrategyOptions& options,
                        const Operations& operations);

// The mean over blocks of `block` keys of sum |k - mean|^2 / sum |k|^2, computed on sampled tiles.
// Between 0 (all keys equal) and 1 (their mean is 0).
double BlockVariance(const RowSpan& keys, std::uint32_t block, std::uint64_t sampled_rows,
                     const Operations& operations);

}  // namespace tessera::kernels
