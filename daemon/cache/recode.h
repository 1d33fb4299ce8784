// The newest part of a lane on its way into another form: what is taken of it, and what comes back.
// The work in between needs no lock, and no reader sees any of it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/cache/lane.h"

namespace tessera::cache {

// The segments of a lane that wait for a strategy: all behind the last sealed one. As long as they
// are held here nobody appends to them, so that the rows that the lane shows stay as they are.
struct OpenRun {
  std::uint32_t lane = 0;
  std::uint32_t layer = 0;
  std::uint32_t kv_head = 0;
  std::vector<HeldSegment> provisional;  // encoded with the strategy before, raw rows kept
  std::vector<HeldSegment> plain;        // rows as they came
  std::uint64_t first_position = 0;      // of the first of all of them
  // The last segment before the plain ones that is in another form: whose strategy new rows take
  // until they get their own. Null: there is none.
  std::shared_ptr<Segment> previous;
  // Whether it may take more whole tiles: then it holds `grows_at` entries.
  bool grows = false;
  std::uint32_t grows_at = 0;

  std::uint64_t provisional_entries() const { return Entries(provisional); }
  std::uint64_t plain_entries() const { return Entries(plain); }

 private:
  static std::uint64_t Entries(const std::vector<HeldSegment>& segments) {
    std::uint64_t entries = 0;
    for (const HeldSegment& held : segments) entries += held.entries;
    return entries;
  }
};

// Full tiles for the end of a segment.
struct SegmentGrowth {
  std::shared_ptr<Segment> segment;
  std::vector<pool::Block> tiles;
  pool::Block table;  // invalid: the one it has holds them

  std::uint32_t entries() const {
    return static_cast<std::uint32_t>(tiles.size() * kernels::kTileEntries);
  }
};

// What takes the place of segments of an OpenRun: as many entries, in the same order.
struct LaneSwap {
  // Whether the provisional segments go, too, or the plain ones alone.
  bool all = false;
  std::optional<SegmentGrowth> growth;  // of `previous`; only where the plain ones alone go
  std::vector<std::shared_ptr<Segment>> segments;  // filled
  // Whether the last of these that is not plain (without one: `growth`) may grow from now on.
  bool growing = false;
};

// Nothing: the lane stays as it is.
using Recoder = std::function<absl::StatusOr<std::optional<LaneSwap>>(const OpenRun& run)>;

}  // namespace tessera::cache
