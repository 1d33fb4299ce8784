// What a token policy sees of a lane: the positions and weights of its entries, and their keys, as
// they came or as near to it as their form allows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/cache/recode.h"
#include "daemon/cache/tenant_memory.h"
#include "daemon/policies/token_policy.h"
#include "kernels/format/operations.h"

namespace tessera::compaction {

class LaneKeys {
 public:
  struct Options {
    const cache::TenantMemory* memory;
    kernels::DenseTile tile;
    const kernels::Operations* operations;
    bool keys = true;  // whether they are wanted; positions and weights always are
  };
  // Of everything in the run, settled segments first. The run is one that was looked at
  // (Sequence::LookAt): others may go on appending to its segments.
  static absl::StatusOr<LaneKeys> Of(const Options& options, const cache::OpenRun& run);

  policies::LaneEntries entries() const {
    return {.keys = keys_.data(),
            .count = positions_.size(),
            .positions = positions_,
            .weights = weights_};
  }

 private:
  LaneKeys(const Options& options, std::span<const std::byte* const> tiles)
      : options_(options), tiles_(tiles) {}
  absl::Status Add(const cache::HeldSegment& held);
  absl::Status AddDense(const cache::HeldSegment& held, std::span<const std::byte* const> tiles,
                        std::byte* keys) const;
  // Rows that were packed: what was kept of them, rotated back.
  absl::Status AddPacked(const cache::HeldSegment& held, std::span<const std::byte* const> tiles,
                         std::byte* keys) const;

  Options options_;
  std::span<const std::byte* const> tiles_;  // of what is still to be added
  std::vector<std::byte> keys_;              // [entries][head_dim]
  std::vector<std::uint64_t> positions_;
  std::vector<float> weights_;  // empty: 1
};

}  // namespace tessera::compaction
