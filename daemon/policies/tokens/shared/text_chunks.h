// Chunks of text: runs of a lane's entries that may be merged with each other, and with no others.
//
// A chunk ends behind a delimiter token, whether or not that token has stayed as an entry; at a
// boundary that an earlier decision has left; and when it has so many entries, which leaves a new
// boundary. Merging makes a chunk's entries fewer, so that only a boundary that is remembered keeps
// its end.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "daemon/policies/token_policy.h"

namespace tessera::policies {

// Entries [begin, end) of a lane.
struct EntryRun {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  bool operator==(const EntryRun&) const = default;
};

struct TextChunks {
  std::vector<EntryRun> ended;  // one after another, none of them empty
  // The one that the next token would belong to, behind the others; may be empty.
  EntryRun open;
  // All that are to be remembered of the lane: LayerMemory::boundaries, those before it was looked
  // at included.
  std::vector<std::uint64_t> boundaries;
};

struct ChunkRules {
  std::uint64_t most_entries = 0;  // of a chunk; its delimiter, sinks and newest tokens count
  // Tokens that chunks end behind, as positions of the view, ascending.
  std::span<const std::uint64_t> delimiters;
  std::uint64_t first = 0;  // of the view: boundaries are positions of the sequence
};

// `boundaries`: of the lane, ascending.
TextChunks ChunksOf(const LaneEntries& lane, const ChunkRules& rules,
                    std::span<const std::uint64_t> boundaries);
// Those that are enough to tell these entries apart.
ChunkEnds EnoughFor(std::span<const std::uint64_t> positions, const ChunkEnds& boundaries);

}  // namespace tessera::policies
