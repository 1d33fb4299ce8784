#include "kernels/dispatch/runs.h"

#include <algorithm>

namespace tessera::kernels {
namespace {

constexpr std::uint64_t kTileAlignment = 64;

// Null where the offset is not that of a tile in the arena. The word may change at any time: it is
// read once, and what was checked is what is used.
const std::byte* ResolveTile(const SegmentView& segment, std::uint64_t index,
                             std::uint64_t tile_bytes) {
  const std::uint64_t offset = __atomic_load_n(segment.tile_offsets + index, __ATOMIC_RELAXED);
  if (offset % kTileAlignment != 0 || offset > segment.arena_bytes ||
      tile_bytes > segment.arena_bytes - offset) {
    return nullptr;
  }
  return segment.arena + offset;
}

bool ListSegmentRuns(const SegmentView& segment, const Task& task, DenseTile tile,
                     const PositionRange& visible, RunList& list) {
  for (std::uint64_t t = task.first_tile; t < task.first_tile + task.tiles; ++t) {
    const std::uint64_t entry = t * kTileEntries;
    const auto rows =
        static_cast<std::uint32_t>(std::min<std::uint64_t>(kTileEntries, segment.entries - entry));
    const std::uint64_t position = segment.first_position + entry;
    if (!visible.Meets(position, rows)) continue;
    const std::byte* base = ResolveTile(segment, t, tile.bytes());
    if (base == nullptr) return false;
    list.runs[list.count++] = {
        .tile = base, .position = position, .row_begin = 0, .row_count = rows};
  }
  return true;
}

void ListTailRuns(const TailView& tail, const Task& task, DenseTile tile,
                  const PositionRange& visible, RunList& list) {
  for (std::uint64_t t = task.first_tile; t < task.first_tile + task.tiles; ++t) {
    const std::uint64_t begin = std::max(tail.begin, t * kTileEntries);
    const std::uint64_t end = std::min(tail.end, t * kTileEntries + kTileEntries);
    if (!visible.Meets(begin, end - begin)) continue;
    list.runs[list.count++] = {.tile = tail.ring + t % tail.ring_tiles * tile.bytes(),
                               .position = begin,
                               .row_begin = static_cast<std::uint32_t>(begin % kTileEntries),
                               .row_count = static_cast<std::uint32_t>(end - begin)};
  }
}

}  // namespace

bool ListRuns(const LaneView& lane, const Task& task, DenseTile tile, const PositionRange& visible,
              RunList& list) {
  list.count = 0;
  if (task.segment != kTailSegment) {
    return ListSegmentRuns(lane.segments[task.segment], task, tile, visible, list);
  }
  ListTailRuns(lane.tail, task, tile, visible, list);
  return true;
}

}  // namespace tessera::kernels
