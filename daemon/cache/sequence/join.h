// Short segments that follow one another, put together. A fork or a cut closes a lane's last
// segment, and what is appended then begins another: a lane that is forked at every token would
// have a segment, a tile and a table for each of them.
//
// An append that begins a segment has it begin with copies of the plain rows before it that do not
// fill a tile. Whoever shares those segments keeps them; where nobody does, they go. Where the
// newest rows are in many short segments all of them are put together: by the append, where nobody
// shares them, else by the next fork, before it shares them with one more. So a lane has a segment
// for 64 of its plain rows at least, on average, and for hundreds where it is forked at every
// token; in a chain of forks each row is copied a few times beyond those while its tile fills.
//
// What that does not reach is joined when somebody compresses a lane with very many segments.
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

// So many of the lane's last segments are to go into the one that an append begins.
std::size_t CountToJoin(const Lane& lane);
// So many into one before the lane is forked.
std::size_t CountToJoinForForks(const Lane& lane);

// Rows that a lane shows of segments of one form, in this order, into tiles of that form.
struct RowsCopy {
  std::span<const HeldSegment> from;
  std::vector<device::TilePlace> tiles;
};
absl::Status CopyRows(const TenantMemory& memory, std::span<const RowsCopy> copies);

// A lane with more segments than this is crowded: what of it can be joined is, when it is
// compressed. Fewer stay as they are, since copies share nothing with forks.
inline constexpr std::size_t kCrowded = shm::kMaxSegments / 2;

// Work for Sequence::Recode of a whole lane: joins short segments of one form that follow one
// another, whatever the form. Nothing: there are none. Of many rows, or where there is little room,
// the first: call it again.
absl::StatusOr<std::optional<LaneSwap>> JoinShort(const TenantMemory& memory, const OpenRun& run);

}  // namespace tessera::cache
