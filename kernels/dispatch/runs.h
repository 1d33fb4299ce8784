// Turns a task into the row runs of a kernel call. Tile offsets are read and checked here.
#pragma once

#include <cstdint>

#include "kernels/dispatch/plan.h"
#include "kernels/format/lane_view.h"
#include "kernels/format/part.h"

namespace tessera::kernels {

struct RunList {
  RowRun runs[kMaxQuadRuns];
  std::uint32_t count = 0;
};

// The address of a tile, or null if its offset does not denote a tile of `tile_bytes` in the arena.
// The offset may change concurrently: it is read once, and the checked value is the one used.
const std::byte* ResolveTile(const SegmentView& segment, std::uint64_t tile,
                             std::uint64_t tile_bytes);

// The address of the summaries of the tile at `base`, checked likewise.
const std::byte* ResolveSummaries(const SegmentView& segment, std::uint64_t tile,
                                  const std::byte* base, const TileLayout& layout);

// The input of ListRuns. `taken` points to the segment's flags if the task has selected blocks.
struct RunSource {
  const LaneView* lane;
  const Task* task;
  DenseTile tail_tile;
  PositionRange visible;
  const std::uint8_t* taken;
};

// Lists the task's runs that overlap `visible`; all runs if the segment has explicit positions.
// False if a tile is outside its arena; nothing has been dereferenced then.
bool ListRuns(const RunSource& source, RunList& list);

}  // namespace tessera::kernels
