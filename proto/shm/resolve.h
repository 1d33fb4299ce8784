// Resolves a lane word to the segments that a kernel reads. Every offset is checked against the
// mapping before it is followed. Daemon and client both use this code, on their own mappings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/format/lane_view.h"
#include "proto/shm/layout.h"

namespace tessera::shm {

// A reader's mapping of a pool or directory. Every byte of [base, base + bytes) is readable,
// whether or not an extent is mapped there: a stale offset reads zeros or garbage but does not
// fault.
struct MappedArena {
  const std::byte* base = nullptr;
  std::uint64_t bytes = 0;

  bool Holds(std::uint64_t offset, std::uint64_t length) const {
    return offset <= bytes && length <= bytes - offset;
  }
};

enum class ResolveStatus : std::uint8_t {
  kOk,
  kNoSnapshot,   // the lane word is 0: the lane has no entries
  kOutOfBounds,  // an offset or count does not fit: the pin was revoked, or the layout differs
};

// The totals of a lane's snapshot.
struct ResolvedLane {
  std::uint64_t entries = 0;
  std::uint64_t tail_start = 0;
  std::uint32_t segments = 0;
};

// Appends the lane's segments to `segments`, or nothing if the result is not kOk. It copies the
// snapshot first and checks the copy.
ResolveStatus ResolveLane(std::uint64_t lane_word, const MappedArena& directory,
                          const MappedArena& pool, std::vector<kernels::SegmentView>& segments,
                          ResolvedLane& lane);

// Returns the lane words of the sequence block at `block_offset`, or null if the block lies outside
// the mapping.
const Word* LaneWords(const MappedArena& directory, std::uint64_t block_offset,
                      const SequenceBlock** block);

}  // namespace tessera::shm
