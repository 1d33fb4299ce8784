// The KV of one (layer, kv head) of a sequence, as the daemon keeps it: the segments, and the
// snapshot that shows them to readers. Guarded by the sequence's lock.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "daemon/cache/segment/segment.h"
#include "daemon/pool/pool.h"
#include "proto/shm/segment_ref.h"

namespace tessera::cache {

// A segment as one lane holds it. Lanes that share a segment may show different counts of it.
struct HeldSegment {
  std::shared_ptr<Segment> segment;
  std::uint32_t entries = 0;

  // Behind the last entry; of no entries the first position.
  std::uint64_t end_position() const {
    return entries == 0 ? segment->first_position() : segment->PositionOf(entries - 1) + 1;
  }
  // How many of the entries stand before this position.
  std::uint32_t EntriesBefore(std::uint64_t position) const;

  // As snapshots show it.
  shm::SegmentRef Ref() const {
    shm::SegmentRef ref = {};
    ref.tile_table = segment->table_offset();
    ref.summary_table = segment->summary_table_offset();
    ref.first_position = segment->first_position();
    ref.position_span = end_position() - segment->first_position();
    ref.entries = entries;
    shm::SetShape(segment->shape(), ref);
    if (const Rotations* rotations = segment->rotations()) {
      ref.rotations = rotations->block.offset();
      ref.rotation_type = static_cast<std::uint8_t>(rotations->type);
      ref.flags = static_cast<std::uint8_t>(
          ref.flags | (rotations->turns_keys ? shm::kSegmentTurnsKeys : 0) |
          (rotations->turns_values ? shm::kSegmentTurnsValues : 0));
    }
    return ref;
  }
};

// Where tokens stand now that keys were turned to other positions.
struct PositionMove {
  std::uint64_t shift = 0;  // how far behind their numbers
  std::uint64_t until = 0;  // those before it were moved, and are not parted any more
};

struct Lane {
  std::vector<HeldSegment> segments;
  // True where the last segment is this lane's alone and may still be appended to. A fork freezes
  // it for both, a truncation in its middle for this lane.
  bool open = false;
  // True where the last segment before the plain ones is this lane's alone and may take more whole
  // tiles of its form. A fork ends it for both; a cut that leaves a partial tile ends it, too.
  bool growing = false;
  // While its newest segments are being encoded (Sequence::Recode).
  bool recoding = false;
  // Of the last truncation: true once nobody reads what it cut off any more.
  std::shared_ptr<const std::atomic<bool>> cut_drained;
  // How often entries were cut off or dropped. Whoever chose among those before it chose among
  // others.
  std::uint64_t losses = 0;
  std::uint64_t entries = 0;     // in all segments
  std::uint64_t tail_start = 0;  // the first token not in a segment
  PositionMove moved;
  pool::Block snapshot;  // published; invalid while the lane holds nothing
  std::uint64_t generation = 0;

  // Whether a frozen last segment may be appended to again: the next token is the next position of
  // it, nobody else holds it (a fork has gone, and its readers with it), and no reader sees rows
  // beyond what this lane shows.
  bool MayReopen() const {
    if (segments.empty() || !segments.back().segment->appendable() ||
        segments.back().end_position() != tail_start || segments.back().segment.use_count() != 1) {
      return false;
    }
    // A count alone orders nothing: releasing a copy sees all that earlier holders did.
    std::shared_ptr<Segment>(segments.back().segment).reset();
    const HeldSegment& last = segments.back();
    return last.entries == last.segment->filled() || (cut_drained != nullptr && *cut_drained);
  }

  std::uint64_t tile_bytes() const {
    std::uint64_t bytes = 0;
    for (const HeldSegment& held : segments) bytes += held.segment->tile_bytes();
    return bytes;
  }
};

}  // namespace tessera::cache
