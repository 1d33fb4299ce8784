// Blocks that a selection chooses, and their share of the true attention.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "client/bench/workload/ablation.h"

namespace tessera::cli::bench {

struct BlockRule {
  std::uint32_t block = 16;  // entries
  double rate = 0.0625;      // share of entries to read
};

// Attention over the raw rows of the selected blocks. One choice per kv head's group.
struct BlockScores {
  Fidelity ideal;        // by the group's true attention mass
  Fidelity mean;         // by mean keys
  Fidelity min_max;      // by minimum and maximum of each channel
  Fidelity packed_mean;  // by rotated mean keys with 25 % of the channels
};
absl::StatusOr<BlockScores> MeasureBlocks(const Examination& examination, const BlockRule& rule);

}  // namespace tessera::cli::bench
