// `Lane` is the daemon's view of the KV of one (layer, kv head) of a sequence: its segments, and
// the snapshot that shows them to readers. Guarded by the sequence's lock.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "daemon/cache/segment/segment.h"
#include "daemon/pool/pool.h"
#include "proto/shm/segment_ref.h"

namespace tessera::cache {

// A segment as one lane holds it. Lanes that share a segment may show different entry counts of it.
struct HeldSegment {
  std::shared_ptr<Segment> segment;
  std::uint32_t entries = 0;

  // The position after the last entry; the first position if there are no entries.
  std::uint64_t end_position() const {
    return entries == 0 ? segment->first_position() : segment->PositionOf(entries - 1) + 1;
  }
  // Number of entries at positions before this one.
  std::uint32_t EntriesBefore(std::uint64_t position) const;

  // The segment as a snapshot lists it.
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
      ref.flags = static_cast<std::uint8_t>(ref.flags | rotations->flags());
    }
    return ref;
  }
};

// Where tokens stand after keys were re-rotated to other positions.
struct PositionMove {
  std::uint64_t shift = 0;  // token number minus position
  std::uint64_t until = 0;  // tokens before it have been moved; a cut may not split them
};

struct Lane {
  std::vector<HeldSegment> segments;
  // The last segment belongs to this lane alone and takes appends. A fork clears it for both sides,
  // a truncation inside the segment for this lane.
  bool open = false;
  // The last segment before the dense ones belongs to this lane alone and may take more whole tiles
  // of its form. Cleared by a fork, and by a cut that leaves a partial tile.
  bool growing = false;
  // Sequence::Recode is encoding the newest segments.
  bool recoding = false;
  // Refers to the last truncation: true once no reader can see the entries it cut off.
  std::shared_ptr<const std::atomic<bool>> cut_readers_done;
  // Counts cuts and drops of entries. A token policy compares it to detect that the entries it
  // chose among have changed.
  std::uint64_t losses = 0;
  std::uint64_t entries = 0;     // in all segments
  std::uint64_t tail_start = 0;  // the first token that is not in a segment
  PositionMove moved;
  pool::Block snapshot;  // the published one; invalid while the lane is empty
  std::uint64_t generation = 0;

  // True if a closed last segment may take appends again: the next token directly follows it, no
  // other lane holds it (a fork was freed and its readers are done), and no reader sees rows beyond
  // this lane's entries.
  bool MayReopen() const {
    if (segments.empty() || !segments.back().segment->appendable() ||
        segments.back().end_position() != tail_start || segments.back().segment.use_count() != 1) {
      return false;
    }
    // use_count alone does not synchronize: releasing a copy orders us after all former holders.
    std::shared_ptr<Segment>(segments.back().segment).reset();
    const HeldSegment& last = segments.back();
    return last.entries == last.segment->filled() ||
           (cut_readers_done != nullptr && *cut_readers_done);
  }

  std::uint64_t tile_bytes() const {
    std::uint64_t bytes = 0;
    for (const HeldSegment& held : segments) bytes += held.segment->tile_bytes();
    return bytes;
  }
};

}  // namespace tessera::cache
