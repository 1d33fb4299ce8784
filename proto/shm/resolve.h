// From a lane word to the LaneView that a kernel reads, with every offset checked against the
// mapping before it is followed. Daemon and client run this same code on their own mappings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/format/lane_view.h"
#include "proto/shm/layout.h"

namespace tessera::shm {

// One mapping as the reader sees it. Every byte of [base, base + bytes) is readable, mapped to an
// extent or not: an offset that is stale reads zeros or garbage, never faults.
struct MappedArena {
  const std::byte* base = nullptr;
  std::uint64_t bytes = 0;

  bool Holds(std::uint64_t offset, std::uint64_t length) const {
    return offset <= bytes && length <= bytes - offset;
  }
};

enum class ResolveStatus : std::uint8_t {
  kOk,
  kNoSnapshot,   // the lane word is zero: the lane holds nothing yet
  kOutOfBounds,  // an offset or count that does not fit: revoked reader or wrong layout
};

// What a snapshot says, beside the segments.
struct ResolvedLane {
  std::uint64_t entries = 0;
  std::uint64_t tail_start = 0;
  std::uint32_t segments = 0;
};

// Appends the lane's segments to `segments`, or nothing where the answer is not kOk. Copies the
// snapshot first, then checks the copy.
ResolveStatus ResolveLane(std::uint64_t lane_word, const MappedArena& directory,
                          const MappedArena& pool, std::vector<kernels::SegmentView>& segments,
                          ResolvedLane& lane);

// The lane words of a block, or null where the block does not fit the mapping.
const Word* LaneWords(const MappedArena& directory, std::uint64_t block_offset,
                      const SequenceBlock** block);

}  // namespace tessera::shm
