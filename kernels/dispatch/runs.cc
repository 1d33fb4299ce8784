#include "kernels/dispatch/runs.h"

#include <algorithm>

namespace tessera::kernels {
namespace {

constexpr std::uint64_t kTileAlignment = 64;

// The offset may change concurrently: read it once and use the checked value.
const std::byte* Resolve(const SegmentView& segment, const std::uint64_t* word,
                         std::uint64_t alignment, std::uint64_t bytes) {
  const std::uint64_t offset = __atomic_load_n(word, __ATOMIC_RELAXED);
  if (offset % alignment != 0 || offset > segment.arena_bytes ||
      bytes > segment.arena_bytes - offset) {
    return nullptr;
  }
  return segment.arena + offset;
}

std::uint32_t RowsOfTile(const SegmentView& segment, std::uint64_t tile) {
  return static_cast<std::uint32_t>(
      std::min<std::uint64_t>(kTileEntries, segment.entries - tile * kTileEntries));
}

// Adds rows [begin, begin + count) of a tile if any are visible.
void AddRun(const SegmentView& segment, const std::byte* base, std::uint64_t tile,
            std::uint32_t begin, std::uint32_t count, const PositionRange& visible, RunList& list) {
  if (segment.shape.positions) {
    list.runs[list.count++] = {
        .tile = base, .position = segment.first_position, .row_begin = begin, .row_count = count};
    return;
  }
  const std::uint64_t position = segment.first_position + tile * kTileEntries + begin;
  if (!visible.Meets(position, count)) return;
  list.runs[list.count++] = {
      .tile = base, .position = position, .row_begin = begin, .row_count = count};
}

bool ListSegmentRuns(const SegmentView& segment, const RunSource& source, RunList& list) {
  const Task& task = *source.task;
  const std::uint64_t bytes = LayoutOf(segment.shape).bytes;
  for (std::uint64_t t = task.first; t < task.first + task.count; ++t) {
    const std::uint32_t rows = RowsOfTile(segment, t);
    if (!segment.shape.positions &&
        !source.visible.Meets(segment.first_position + t * kTileEntries, rows)) {
      continue;
    }
    const std::byte* base = ResolveTile(segment, t, bytes);
    if (base == nullptr) return false;
    AddRun(segment, base, t, 0, rows, source.visible, list);
  }
  return true;
}

// Adds the runs of a tile's taken blocks. `flags` starts with the tile's first block; adjacent
// taken blocks form one run.
void AddSelectedRuns(const SegmentView& segment, const std::byte* base, std::uint64_t tile,
                     std::uint64_t flags, std::uint32_t blocks, const PositionRange& visible,
                     RunList& list) {
  const std::uint32_t block = segment.shape.block;
  const std::uint32_t rows = RowsOfTile(segment, tile);
  const auto taken = [flags](std::uint32_t b) { return (flags >> 8 * b & 1) != 0; };
  for (std::uint32_t b = 0; b < blocks;) {
    if (!taken(b)) {
      ++b;
      continue;
    }
    const std::uint32_t first = b;
    while (b < blocks && taken(b)) ++b;
    AddRun(segment, base, tile, first * block, std::min(b * block, rows) - first * block, visible,
           list);
  }
}

// Selected tasks begin and end at tile boundaries.
bool ListSelectedRuns(const SegmentView& segment, const RunSource& source, RunList& list) {
  const Task& task = *source.task;
  const std::uint64_t bytes = LayoutOf(segment.shape).bytes;
  const std::uint32_t per_tile = segment.shape.blocks();
  const std::uint64_t end = task.first + task.count;
  for (std::uint64_t word = task.first; word < end; word += kFlagBlocks) {
    const auto left = static_cast<std::uint32_t>(std::min<std::uint64_t>(kFlagBlocks, end - word));
    const std::uint64_t flags = LoadFlags(source.taken + word, left);
    if (flags == 0) continue;
    for (std::uint32_t b = 0; b < left; b += per_tile) {
      const std::uint64_t of_tile = flags >> 8 * b;
      const std::uint32_t blocks = std::min(per_tile, left - b);
      if (blocks < kFlagBlocks && (of_tile & ((std::uint64_t{1} << 8 * blocks) - 1)) == 0) continue;
      const std::uint64_t tile = (word + b) / per_tile;
      const std::byte* base = ResolveTile(segment, tile, bytes);
      if (base == nullptr) return false;
      AddSelectedRuns(segment, base, tile, of_tile, blocks, source.visible, list);
    }
  }
  return true;
}

void ListTailRuns(const TailView& tail, const RunSource& source, RunList& list) {
  const Task& task = *source.task;
  for (std::uint64_t t = task.first; t < task.first + task.count; ++t) {
    const std::uint64_t begin = std::max(tail.begin, t * kTileEntries);
    const std::uint64_t end = std::min(tail.end, t * kTileEntries + kTileEntries);
    if (!source.visible.Meets(begin, end - begin)) continue;
    list.runs[list.count++] = {.tile = tail.ring + t % tail.ring_tiles * source.tail_tile.bytes(),
                               .position = begin,
                               .row_begin = static_cast<std::uint32_t>(begin % kTileEntries),
                               .row_count = static_cast<std::uint32_t>(end - begin)};
  }
}

}  // namespace

const std::byte* ResolveTile(const SegmentView& segment, std::uint64_t tile,
                             std::uint64_t tile_bytes) {
  return Resolve(segment, segment.tile_offsets + tile, kTileAlignment, tile_bytes);
}

const std::byte* ResolveSummaries(const SegmentView& segment, std::uint64_t tile,
                                  const std::byte* base, const TileLayout& layout) {
  if (segment.summary_offsets != nullptr) {
    return Resolve(segment, segment.summary_offsets + tile, kSummaryAlignment,
                   layout.summary_bytes);
  }
  const auto behind = static_cast<std::uint64_t>(base - segment.arena) + layout.bytes;
  if (layout.summary_bytes > segment.arena_bytes - behind) return nullptr;
  return SummariesAfter(base, layout);
}

bool ListRuns(const RunSource& source, RunList& list) {
  list.count = 0;
  if (source.task->segment == kTailSegment) {
    ListTailRuns(source.lane->tail, source, list);
    return true;
  }
  const SegmentView& segment = source.lane->segments[source.task->segment];
  return source.task->selected ? ListSelectedRuns(segment, source, list)
                               : ListSegmentRuns(segment, source, list);
}

}  // namespace tessera::kernels
