// From a task to the row runs that a kernel follows: where tile offsets are read and checked.
#pragma once

#include <cstdint>

#include "kernels/dispatch/plan.h"
#include "kernels/format/dense_tile.h"
#include "kernels/format/lane_view.h"
#include "kernels/format/part.h"

namespace tessera::kernels {

struct RunList {
  RowRun runs[kMaxPartRuns];
  std::uint32_t count = 0;
};

// Lists the task's runs that `visible` meets. False where a tile does not lie in its arena; then
// nothing was dereferenced.
bool ListRuns(const LaneView& lane, const Task& task, DenseTile tile, const PositionRange& visible,
              RunList& list);

}  // namespace tessera::kernels
