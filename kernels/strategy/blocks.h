// How long the blocks may be that one mean key stands for.
#pragma once

#include <cstdint>

#include "kernels/format/operations.h"
#include "kernels/strategy/moments.h"
#include "kernels/strategy/strategy.h"

namespace tessera::kernels {

struct BlockChoice {
  std::uint32_t block = 0;  // entries; 0: no summaries
  double variance = 0;      // mean |k - mean|^2 / |k|^2
};
BlockChoice ChooseBlock(const RowSpan& keys, const StrategyOptions& options,
                        const Operations& operations);

// Of blocks of so many keys: sum |k - mean|^2 / sum |k|^2 over each block's keys, which is between
// 0 (all equal) and 1 (a mean of 0); the mean over blocks of sampled tiles.
double BlockVariance(const RowSpan& keys, std::uint32_t block, std::uint64_t sampled_rows,
                     const Operations& operations);

}  // namespace tessera::kernels
