// Joins consecutive short segments of a lane into one. A fork or a truncation closes a lane's last
// segment and the next append begins a new one, so a lane that is forked at every token would
// otherwise have a segment, a tile and a table per token.
//
// An append that begins a segment first copies the preceding dense rows that do not fill a tile.
// The old segments survive if another lane shares them. If the newest rows are in many short
// segments, all of them are joined: by the append if no other lane shares them, else by the next
// fork, before it shares them once more. On average a lane then has at most one segment per 64 of
// its dense rows, and one per several hundred if it is forked at every token. In a chain of forks
// each row is copied a few extra times while its tile fills.
//
// The segments this does not reach are joined when a lane with very many segments is compressed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/cache/memory/tenant_memory.h"
#include "daemon/cache/segment/lane.h"
#include "daemon/cache/segment/recode.h"

namespace tessera::cache {

// Number of the lane's last segments to copy into the segment that an append begins.
std::size_t CountToJoin(const Lane& lane);
// The same for the segment that is built before the lane is forked.
std::size_t CountToJoinForForks(const Lane& lane);

// A copy of the rows that a lane shows of segments of one form, in order, into tiles of that form.
struct RowsCopy {
  std::span<const HeldSegment> from;
  std::vector<device::TilePlace> tiles;
};
absl::Status CopyRows(const TenantMemory& memory, std::span<const RowsCopy> copies);

// A lane with more segments than this is crowded, and compressing it joins what can be joined.
// Fewer segments are left alone, because a copy shares nothing with forks.
inline constexpr std::size_t kCrowded = shm::kMaxSegments / 2;

// Joins consecutive short segments of equal form: work for Sequence::Recode of a whole lane.
// Returns nullopt if there are none. Joins only the first ones if there are many rows or little
// room; call it again for the rest.
absl::StatusOr<std::optional<LaneSwap>> JoinShortSegments(const TenantMemory& memory,
                                                          const OpenRun& run);

}  // namespace tessera::cache
