// The KV of one (layer, kv head) of a sequence, as the daemon keeps it: the segments, and the
// snapshot that shows them to readers. Guarded by the sequence's lock.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "daemon/cache/segment.h"
#include "daemon/pool/pool.h"

namespace tessera::cache {

// A segment as one lane holds it. Lanes that share a segment may show different counts of it.
struct HeldSegment {
  std::shared_ptr<Segment> segment;
  std::uint32_t entries = 0;
};

struct Lane {
  std::vector<HeldSegment> segments;
  // True where the last segment is this lane's alone and may still be appended to. A fork freezes
  // it for both.
  bool open = false;
  std::uint64_t entries = 0;     // in all segments
  std::uint64_t tail_start = 0;  // the first token not in a segment
  pool::Block snapshot;          // published; invalid while the lane holds nothing
  std::uint64_t generation = 0;

  std::uint64_t tile_bytes() const {
    std::uint64_t bytes = 0;
    for (const HeldSegment& held : segments) bytes += held.segment->tile_bytes();
    return bytes;
  }
};

}  // namespace tessera::cache
