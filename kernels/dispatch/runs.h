// From a task to the row runs that a kernel follows: where tile offsets are read and checked.
#pragma once

#include <cstdint>

#include "kernels/dispatch/plan.h"
#include "kernels/format/lane_view.h"
#include "kernels/format/part.h"

namespace tessera::kernels {

struct RunList {
  RowRun runs[kMaxPartRuns];
  std::uint32_t count = 0;
};

// The tile's first byte, or null where the offset is not that of a tile of `tile_bytes` in the
// arena. The word may change at any time: it is read once, and what was checked is what is used.
const std::byte* ResolveTile(const SegmentView& segment, std::uint64_t tile,
                             std::uint64_t tile_bytes);

// The first byte of the summaries of the tile that lies at `base`, likewise.
const std::byte* ResolveSummaries(const SegmentView& segment, std::uint64_t tile,
                                  const std::byte* base, const TileLayout& layout);

// What ListRuns looks at. `taken`: of the segment's blocks, where the task is of selected ones.
struct RunSource {
  const LaneView* lane;
  const Task* task;
  DenseTile tail_tile;
  PositionRange visible;
  const std::uint8_t* taken;
};

// Lists the task's runs that the range meets (of a segment with explicit positions: all). False
// where a tile does not lie in its arena; then nothing was dereferenced.
bool ListRuns(const RunSource& source, RunList& list);

}  // namespace tessera::kernels
