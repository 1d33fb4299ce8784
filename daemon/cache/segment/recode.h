// The newest part of a lane on its way into another form: what is taken of it, and what comes back.
// The work in between needs no lock, and no reader sees any of it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/cache/segment/lane.h"

namespace tessera::cache {

// The segments of a lane that wait for a strategy: all behind the last sealed one, up to the newest
// token and without a gap. As long as Recode holds them nobody appends to them, so that the rows
// that the lane shows stay as they are.
struct OpenRun {
  std::uint32_t lane = 0;
  std::uint32_t layer = 0;
  std::uint32_t kv_head = 0;
  // Those before them; only where the whole lane was asked for.
  std::vector<HeldSegment> settled;
  std::vector<HeldSegment> provisional;  // encoded with the strategy before, raw rows kept
  std::vector<HeldSegment> plain;        // rows as they came
  std::uint64_t before = 0;              // entries of the lane before all of them
  std::uint64_t segments_before = 0;     // that these are in
  std::uint64_t first_position = 0;      // of the first of all of them
  std::uint64_t tokens = 0;              // of the lane, all that have come until the last of them
  // The last segment before the plain ones that is in another form: whose strategy new rows take
  // until they get their own. Null: there is none.
  std::shared_ptr<Segment> previous;
  // The last packed one before the plain ones, whatever stands behind it. Null: there is none.
  std::shared_ptr<Segment> packed;
  // Whether it may take more whole tiles: then it holds `grows_at` entries.
  bool grows = false;
  std::uint32_t grows_at = 0;
  std::uint64_t losses = 0;  // of the lane until then
  // Of LookAt alone: the tiles of everything above, in that order. A segment that goes on growing
  // must not be asked for them.
  std::vector<const std::byte*> tiles;

  // All that wait: provisional ones, then plain ones.
  std::vector<HeldSegment> Waiting() const {
    std::vector<HeldSegment> waiting = provisional;
    waiting.insert(waiting.end(), plain.begin(), plain.end());
    return waiting;
  }
  std::uint64_t settled_entries() const { return Entries(settled); }
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
  Tiles tiles;
  pool::Block table;  // invalid: the one it has holds them

  std::uint32_t entries() const {
    return static_cast<std::uint32_t>(tiles.size() * kernels::kTileEntries);
  }
};

// What takes the place of segments of an OpenRun: as many entries, in the same order, unless
// entries are dropped.
struct LaneSwap {
  // Whether the provisional segments go, too, or the plain ones alone.
  bool all = false;
  // Whether the settled ones go, too; then all go.
  bool whole = false;
  // Whether the lane holds fewer entries afterwards; it must not have been cut meanwhile.
  bool drops = false;
  std::optional<PositionMove> moves;    // of the sequence, from then on
  std::optional<SegmentGrowth> growth;  // of `previous`; only where the plain ones alone go
  std::vector<std::shared_ptr<Segment>> segments;  // filled
  // The first so many of these were not made for it: somebody else holds them, too.
  std::size_t taken_over = 0;
  // Instead of these, where the whole lane goes: what it holds then, segments that it held before
  // among them. It must not have been cut meanwhile.
  std::vector<HeldSegment> held;
  // Whether the policy does not say that this is done: the sequence is made by hand from then on.
  bool by_hand = false;
  // Whether the last of these that is not plain (without one: `growth`) may grow from now on.
  bool growing = false;
};

// Nothing: the lane stays as it is.
using Recoder = std::function<absl::StatusOr<std::optional<LaneSwap>>(const OpenRun& run)>;

}  // namespace tessera::cache
