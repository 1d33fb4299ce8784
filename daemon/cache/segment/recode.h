// Recoding: encodes the newest part of a lane in another form. `OpenRun` is the input of that work
// and `LaneSwap` its result. The work needs no lock, and no reader sees it until it is swapped in.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/cache/segment/lane.h"

namespace tessera::cache {

// The segments of a lane that wait for a strategy: all segments after the last sealed one, up to
// the newest token and without gaps. While Recode holds them, nothing is appended to them, so the
// rows that the lane shows do not change.
struct OpenRun {
  std::uint32_t lane = 0;
  std::uint32_t layer = 0;
  std::uint32_t kv_head = 0;
  // Earlier segments; filled only if the whole lane was requested.
  std::vector<HeldSegment> settled;
  std::vector<HeldSegment> provisional;  // encoded with the previous strategy, raw rows kept
  std::vector<HeldSegment> plain;        // dense rows, not yet encoded
  std::uint64_t before = 0;              // number of the lane's entries before the ones that wait
  std::uint64_t segments_before = 0;     // number of segments that hold those
  std::uint64_t first_position = 0;      // position of the first entry that waits
  std::uint64_t tokens = 0;              // tokens of the lane up to the end of this part
  // The last segment in another form than dense before the dense ones. New rows take its strategy
  // until they get their own. Null: none.
  std::shared_ptr<Segment> previous;
  // The last packed segment before the dense ones, regardless of what follows it. Null: none.
  std::shared_ptr<Segment> packed;
  // True if `previous` may take more whole tiles; it then holds `grows_at` entries.
  bool grows = false;
  std::uint32_t grows_at = 0;
  std::uint64_t losses = 0;  // Lane::losses when this was taken
  // LookAt only: the tiles of all segments above, in that order. Use these rather than asking a
  // segment that may still grow.
  std::vector<const std::byte*> tiles;

  // All segments that wait: provisional ones, then dense ones.
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

// Full tiles to be added at the end of a segment.
struct SegmentGrowth {
  std::shared_ptr<Segment> segment;
  Tiles tiles;
  pool::Block table;  // invalid: the segment's table has room

  std::uint32_t entries() const {
    return static_cast<std::uint32_t>(tiles.size() * kernels::kTileEntries);
  }
};

// What replaces segments of an OpenRun: the same number of entries in the same order, unless
// entries are dropped.
struct LaneSwap {
  // Replaces the provisional segments too, not only the dense ones.
  bool all = false;
  // Replaces the settled segments too; implies `all`.
  bool whole = false;
  // The lane ends up with fewer entries; fails if it was cut in the meantime.
  bool drops = false;
  std::optional<PositionMove> moves;               // new positions of the tokens
  std::optional<SegmentGrowth> growth;             // for `previous`; never with `all`
  std::vector<std::shared_ptr<Segment>> segments;  // filled with entries
  // Number of leading segments that were adopted from another lane rather than built.
  std::size_t taken_over = 0;
  // Instead of `segments`, when the whole lane is replaced: its new contents, which may include
  // segments that it held before. Fails if the lane was cut in the meantime.
  std::vector<HeldSegment> held;
  // The policy does not describe the result, so the sequence is marked as made by hand.
  bool by_hand = false;
  // The last of these segments that is not dense (without one: `growth`) may grow from now on.
  bool growing = false;
};

// Tile bytes that swaps have replaced, and those that they put in their place.
struct ReplacedBytes {
  std::atomic<std::uint64_t> before{0};
  std::atomic<std::uint64_t> after{0};
};

// Returns nullopt to leave the lane as it is.
using Recoder = std::function<absl::StatusOr<std::optional<LaneSwap>>(const OpenRun& run)>;

}  // namespace tessera::cache
