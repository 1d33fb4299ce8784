// Which blocks a selection takes, and how much of the true attention they have.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "client/bench/workload/ablation.h"

namespace tessera::cli::bench {

struct BlockRule {
  std::uint32_t block = 16;  // entries
  double rate = 0.0625;      // of the entries that are looked at
};

// Attention over the raw rows of what was taken. One choice for a kv head's whole group.
struct BlockScores {
  Fidelity ideal;        // blocks by the true attention that the group's heads give them together
  Fidelity mean;         // by their mean key
  Fidelity min_max;      // by the least and greatest element of each channel
  Fidelity packed_mean;  // by their mean key, rotated, a quarter of its channels kept
};
absl::StatusOr<BlockScores> MeasureBlocks(const Examination& examination, const BlockRule& rule);

}  // namespace tessera::cli::bench
