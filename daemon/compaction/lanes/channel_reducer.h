// Re-encodes packed segments of a lane with fewer channels, or with fewer bits if they are planes,
// to free memory.
//
// Skipped are segments that another lane shares, because both forms together would take more
// memory, and rows that wait for a strategy. Runs inside Sequence::Recode of the whole lane.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/cache/memory/tenant_memory.h"
#include "daemon/cache/segment/recode.h"
#include "kernels/format/operations.h"
#include "kernels/format/tile_shape.h"
#include "kernels/strategy/reduce/channels.h"

namespace tessera::compaction {

// Memory that is freed when the last readers of the old form are done.
struct ReducedBytes {
  std::uint64_t bytes = 0;
  std::uint64_t segments = 0;
};

class ChannelReducer {
 public:
  struct Options {
    const cache::TenantMemory* memory;
    const kernels::Operations* operations;
    double share;         // largest share of the channels that a packed row keeps; 0: all
    bool drops_crumbs;    // of keys in planes
    std::uint64_t bytes;  // how much to free; the oldest segments are re-encoded first
  };
  ChannelReducer(const Options& options, const cache::OpenRun& run)
      : options_(options), run_(run) {}

  // nullopt: no segment can become smaller. RESOURCE_EXHAUSTED: there was no memory for the new
  // form of any segment; if some fit, those are re-encoded.
  absl::StatusOr<std::optional<cache::LaneSwap>> Thin();
  const ReducedBytes& thinned() const { return reduced_; }

 private:
  bool IsShared(const cache::HeldSegment& held) const;
  std::optional<kernels::TileShape> ThinnerShape(const kernels::TileShape& shape) const;
  kernels::Stays ThinTile(const kernels::ReduceJob& job) const;
  // Null: the segment cannot become smaller.
  absl::StatusOr<std::shared_ptr<cache::Segment>> Thinner(const cache::HeldSegment& held) const;
  absl::Status FillTiles(const cache::HeldSegment& held, cache::Segment& thinner) const;

  const Options options_;
  const cache::OpenRun& run_;
  ReducedBytes reduced_;
  bool previous_grows_ = false;  // the growing segment is as it was, or is planes with fewer bits
};

}  // namespace tessera::compaction
