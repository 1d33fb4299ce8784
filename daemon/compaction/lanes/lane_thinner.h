// Rows of packed segments keep fewer channels than they have, for want of memory. Segments that
// somebody else shares stay as they are: two forms would take more than one. So do rows that wait
// for a strategy.
//
// Runs inside Sequence::Recode of the whole lane.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/cache/memory/tenant_memory.h"
#include "daemon/cache/segment/recode.h"
#include "kernels/format/tile_shape.h"

namespace tessera::compaction {

// What was gained, when readers have moved on.
struct Thinned {
  std::uint64_t bytes = 0;
  std::uint64_t segments = 0;
};

class LaneThinner {
 public:
  struct Options {
    const cache::TenantMemory* memory;
    double share;         // of the channels, that rows are left at most
    std::uint64_t bytes;  // to be gained; the oldest segments come first
  };
  LaneThinner(const Options& options, const cache::OpenRun& run) : options_(options), run_(run) {}

  // Nothing: there is nothing to gain. RESOURCE_EXHAUSTED where there is no room for any segment's
  // new form beside the old one; what there is room for is done.
  absl::StatusOr<std::optional<cache::LaneSwap>> Thin();
  const Thinned& thinned() const { return thinned_; }

 private:
  bool IsShared(const cache::HeldSegment& held) const;
  // Null: it cannot become smaller.
  absl::StatusOr<std::shared_ptr<cache::Segment>> Thinner(const cache::HeldSegment& held) const;
  absl::Status FillTiles(const cache::HeldSegment& held, cache::Segment& thinner) const;

  const Options options_;
  const cache::OpenRun& run_;
  Thinned thinned_;
};

}  // namespace tessera::compaction
