// Splits a lane into chunks of text: ranges of entries that may be merged with each other only.
//
// A chunk ends after a delimiter token, even if that token was dropped; at a boundary of an earlier
// decision; and when it has the maximum number of entries, which adds a boundary. Sinks, newest
// tokens and the delimiter count; each kv head counts its own entries. Boundaries are remembered
// (LayerMemory::boundaries), because merging changes the number of entries by which the end was
// found. Truncation forgets later boundaries, forks copy them, later policies keep them. A chunk
// that is not full continues with the next prompt and counts the entries that are left of it.
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
  std::vector<EntryRun> ended;  // consecutive, none of them empty
  // The last chunk, to which the next token will belong; may be empty.
  EntryRun open;
  // All boundaries to remember for the lane (LayerMemory::boundaries), including those before the
  // view.
  std::vector<std::uint64_t> boundaries;
};

struct ChunkRules {
  std::uint64_t most_entries = 0;  // per chunk, including delimiter, sinks and newest tokens
  // Positions in the view of tokens that end a chunk, ascending.
  std::span<const std::uint64_t> delimiters;
  std::uint64_t first = 0;  // position in the sequence where the view begins
};

// `boundaries`: the lane's known boundaries, positions in the sequence, ascending.
TextChunks ChunksOf(const LaneEntries& lane, const ChunkRules& rules,
                    std::span<const std::uint64_t> boundaries);
// Drops boundaries until there is at most one between neighboring entries, and at both ends.
ChunkEnds PruneBoundaries(std::span<const std::uint64_t> positions, const ChunkEnds& boundaries);

}  // namespace tessera::policies
