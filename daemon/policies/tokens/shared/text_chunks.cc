#include "daemon/policies/tokens/shared/text_chunks.h"

#include <algorithm>

namespace tessera::policies {

// At most one boundary is kept between two entries, and before the first one: the lowest, which
// survives most truncations. Boundaries before the view are kept unchanged, because they separate
// entries that are out of view and that a later policy may see again.
TextChunks ChunksOf(const LaneEntries& lane, const ChunkRules& rules,
                    std::span<const std::uint64_t> boundaries) {
  TextChunks chunks;
  if (lane.count == 0) {
    chunks.boundaries.assign(boundaries.begin(), boundaries.end());
    return chunks;
  }
  // The view may begin before the lane's first entry, for the sake of another lane.
  auto boundary = lane.before == 0
                      ? boundaries.begin()
                      : std::ranges::upper_bound(boundaries, rules.first + lane.positions.front());
  chunks.boundaries.assign(boundaries.begin(), boundary);
  // Whether there is a boundary up to this entry, or after the last one. Advances past them.
  const auto bounded = [&](std::uint64_t next_entry) {
    const auto behind = next_entry == lane.count
                            ? boundaries.end()
                            : std::upper_bound(boundary, boundaries.end(),
                                               rules.first + lane.positions[next_entry]);
    if (boundary == behind) return false;
    chunks.boundaries.push_back(*boundary);
    boundary = behind;
    return true;
  };
  bounded(0);
  auto delimiter = std::ranges::lower_bound(rules.delimiters, lane.positions.front());
  std::uint64_t begin = 0;
  for (std::uint64_t i = 0; i < lane.count; ++i) {
    const std::uint64_t position = lane.positions[i];
    const bool at_delimiter = delimiter != rules.delimiters.end() && *delimiter == position;
    // Is there a delimiter from this entry on, before the next one?
    bool ends = false;
    for (; delimiter != rules.delimiters.end() &&
           (i + 1 == lane.count || *delimiter < lane.positions[i + 1]);
         ++delimiter) {
      ends = true;
    }
    if (bounded(i + 1)) {
      ends = true;
    } else if (i + 1 - begin == rules.most_entries && !at_delimiter) {
      ends = true;
      chunks.boundaries.push_back(rules.first + position + 1);
    }
    if (!ends) continue;
    chunks.ended.push_back({.begin = begin, .end = i + 1});
    begin = i + 1;
  }
  chunks.open = {.begin = begin, .end = lane.count};
  return chunks;
}

ChunkEnds PruneBoundaries(std::span<const std::uint64_t> positions, const ChunkEnds& boundaries) {
  std::vector<std::uint64_t> enough;
  auto next = positions.begin();
  for (const std::uint64_t boundary : boundaries) {
    // Keep the first boundary after the entry before `next`, skip the others.
    if (!enough.empty() && (next == positions.end() || *next >= boundary)) continue;
    while (next != positions.end() && *next < boundary) ++next;
    enough.push_back(boundary);
  }
  return ChunkEnds(std::move(enough));
}

}  // namespace tessera::policies
