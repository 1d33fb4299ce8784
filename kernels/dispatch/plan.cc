#include "kernels/dispatch/plan.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace tessera::kernels {
namespace {

constexpr std::uint64_t kEveryPosition = std::numeric_limits<std::uint64_t>::max();

std::uint64_t TilesOf(std::uint32_t entries) {
  return (std::uint64_t{entries} + kTileEntries - 1) / kTileEntries;
}

// Whether the queries must be converted: rotated for packed rows, widened to fp32 for scores.
bool NeedsSpace(const AttendItem& item, const SegmentView& segment) {
  return segment.shape.packed() || (item.selection != nullptr && BlocksOf(segment) != 0);
}

// Calls add(first_tile, tiles) for each part of the segment that `visible` overlaps.
template <class Add>
void ForEachWholePart(const SegmentView& segment, const PositionRange& visible, Add add) {
  std::uint64_t first = 0;
  std::uint64_t last = segment.entries - 1;
  if (!segment.shape.positions) {
    if (visible.begin > segment.first_position) first = visible.begin - segment.first_position;
    last = std::min<std::uint64_t>(segment.entries, visible.end - segment.first_position) - 1;
  }
  const std::uint64_t tiles = TilesOf(segment.entries);
  for (std::uint64_t part = first / kPartEntries; part <= last / kPartEntries; ++part) {
    const std::uint64_t tile = part * kMaxPartRuns;
    add(tile, static_cast<std::uint32_t>(std::min<std::uint64_t>(kMaxPartRuns, tiles - tile)));
  }
}

// Calls add(first_block, blocks) for pieces of the segment with enough taken blocks to form a part.
// Processes kFlagBlocks blocks at a time: whole tiles with at most kFlagBlocks / 2 runs.
template <class Add>
void ForEachSelectedPart(const SegmentView& segment, const std::uint8_t* taken, Add add) {
  const std::uint32_t blocks = BlocksOf(segment);
  const std::uint64_t tile_starts = TileStarts(segment.shape.blocks());
  std::uint32_t first = 0;
  std::uint32_t entries = 0;
  std::uint32_t runs = 0;
  for (std::uint32_t b = 0; b < blocks; b += kFlagBlocks) {
    const std::uint64_t flags = LoadFlags(taken + b, blocks - b);
    const std::uint32_t end = std::min(b + kFlagBlocks, blocks);
    if (flags != 0) {
      // Runs never cross tiles, so a taken block that follows a taken one of its tile extends that
      // run.
      entries += SumFlags(flags) * segment.shape.block;
      runs += SumFlags(flags & (~(flags << 8) | tile_starts));
    }
    const bool many_runs = runs >= kSelectedPartRuns && !segment.shape.planes();
    const bool full = entries >= kSelectedPartEntries || many_runs;
    if (!full && !(end == blocks && entries != 0)) continue;
    add(first, end - first);
    first = end;
    entries = 0;
    runs = 0;
  }
}

template <class Add>
void ForEachTailPart(const TailView& tail, const PositionRange& visible, Add add) {
  if (!visible.Meets(tail.begin, tail.end - tail.begin)) return;
  const std::uint64_t end_tile = (tail.end - 1) / kTileEntries + 1;
  for (std::uint64_t tile = tail.begin / kTileEntries; tile < end_tile; tile += kMaxPartRuns) {
    const std::uint64_t tiles = std::min<std::uint64_t>(kMaxPartRuns, end_tile - tile);
    if (!visible.Meets(tile * kTileEntries, tiles * kTileEntries)) continue;
    add(tile, static_cast<std::uint32_t>(tiles));
  }
}

// Calls visit(item index, item, first row, rows, sound) for each cell of the batch.
template <class Visit>
void ForEachCell(const AttendBatch& batch, Visit visit) {
  const std::uint32_t group = batch.geometry.group();
  for (std::uint32_t i = 0; i < batch.items.size(); ++i) {
    const AttendItem& item = batch.items[i];
    const bool sound = IsValidItem(batch, item);
    const std::uint32_t rows = item.queries * group;
    for (std::uint32_t first = 0; first < rows; first += kMaxPartRows) {
      visit(i, item, first, std::min(kMaxPartRows, rows - first), sound);
    }
  }
}

// Calls add(segment index) for each segment that has a rotated space not seen before.
template <class Add>
void ForEachSpace(const AttendItem& item, const PositionRange& visible, Add add) {
  const LaneView& lane = *item.lane;
  const SegmentView* book = nullptr;  // of the latest space of planes
  for (std::uint32_t s = 0; s < lane.segment_count; ++s) {
    const SegmentView& segment = lane.segments[s];
    if (!visible.Meets(segment.first_position, segment.positions())) continue;
    if (!NeedsSpace(item, segment)) continue;
    if (book != nullptr && SharesBook(*book, segment)) continue;
    if (segment.shape.planes()) book = &segment;
    add(s);
  }
}

std::uint64_t SpaceFloats(const SegmentView& segment, std::uint32_t rows) {
  const std::uint32_t mean_products = segment.rotation.key_mean != nullptr ? kMaxPartRows : 0;
  return mean_products + std::uint64_t{rows} * PaddedChannels(segment.shape);
}

// An upper bound of the number of tasks of one cell.
std::uint64_t MostTasks(const AttendItem& item, const PositionRange& visible) {
  const LaneView& lane = *item.lane;
  std::uint64_t tasks = 0;
  std::uint64_t selectable = 0;  // entries, with every block counted as full
  std::uint64_t segments = 0;
  bool positions = false;
  for (std::uint32_t s = 0; s < lane.segment_count; ++s) {
    const SegmentView& segment = lane.segments[s];
    const bool selects = item.selection != nullptr && BlocksOf(segment) != 0;
    if (selects) {
      selectable += std::uint64_t{BlocksOf(segment)} * segment.shape.block;
      ++segments;
      positions |= segment.shape.positions;
    }
    if (!visible.Meets(segment.first_position, segment.positions())) continue;
    if (!selects) {
      ForEachWholePart(segment, visible, [&](std::uint64_t, std::uint32_t) { ++tasks; });
    }
  }
  if (segments != 0) {
    // Every part but a segment's last holds at least kSelectedPartRuns of the smallest blocks. The
    // taken entries may exceed the budget by: the last block taken, two forced blocks, two blocks
    // at the edges of the visible range, and each segment's partial last block, counted as full.
    constexpr std::uint64_t kLeast = kSelectedPartRuns * kMinBlock;
    const std::uint64_t excess = kTileEntries * (segments + 5);
    // Positions are read from the tiles. If they do not rise, any block may be partly visible.
    const std::uint64_t wanted =
        positions ? selectable : BudgetOf(*item.selection, {.entries = selectable}) + excess;
    const std::uint64_t most = std::min(selectable, wanted);
    tasks += segments + most / kLeast;
  }
  ForEachTailPart(lane.tail, visible, [&](std::uint64_t, std::uint32_t) { ++tasks; });
  return std::max<std::uint64_t>(tasks, 1);
}

// Calls add for each task of one cell, in lane order.
template <class Add>
void ForEachTask(const AttendItem& item, const PositionRange& visible, SelectedBlockFlags taken,
                 Add add) {
  const LaneView& lane = *item.lane;
  std::uint32_t first_block = 0;
  for (std::uint32_t s = 0; s < lane.segment_count; ++s) {
    const SegmentView& segment = lane.segments[s];
    const std::uint32_t blocks = BlocksOf(segment);
    const std::uint8_t* own = taken == nullptr ? nullptr : taken + first_block;
    first_block += blocks;
    if (!visible.Meets(segment.first_position, segment.positions())) continue;
    if (own != nullptr && blocks != 0) {
      ForEachSelectedPart(segment, own, [&](std::uint64_t first, std::uint32_t count) {
        add(s, true, first, count);
      });
    } else {
      ForEachWholePart(segment, visible, [&](std::uint64_t first, std::uint32_t count) {
        add(s, false, first, count);
      });
    }
  }
  ForEachTailPart(lane.tail, visible, [&](std::uint64_t first, std::uint32_t count) {
    add(kTailSegment, false, first, count);
  });
}

bool IsValidSegment(const AttendBatch& batch, const SegmentView& segment) {
  const TileShape& shape = segment.shape;
  if (UnsupportedReason(shape) != nullptr || shape.head_dim != batch.geometry.head_dim)
    return false;
  if (!shape.packed() && shape.format != DenseFormat(batch.geometry.type)) return false;
  return HasRequiredRotations(shape, segment.rotation);
}

}  // namespace

bool IsValidItem(const AttendBatch& batch, const AttendItem& item) {
  if (item.selection != nullptr && item.selection->each_head && batch.geometry.group() != 1) {
    return false;
  }
  if (item.selection != nullptr && item.selection->each_query && item.queries != 1) return false;
  const LaneView& lane = *item.lane;
  for (std::uint32_t s = 0; s < lane.segment_count; ++s) {
    if (!IsValidSegment(batch, lane.segments[s])) return false;
  }
  const TailView& tail = lane.tail;
  return tail.end >= tail.begin &&
         tail.end - tail.begin <= std::uint64_t{tail.ring_tiles} * kTileEntries;
}

bool SharesBook(const SegmentView& a, const SegmentView& b) {
  return a.shape.planes() && b.shape.planes() && a.rotation == b.rotation &&
         a.shape.key_planes.planes() == b.shape.key_planes.planes();
}

const Space& SpaceOf(const LaneView& lane, const Cell& cell, std::span<const Space> spaces,
                     std::uint32_t segment) {
  const std::span<const Space> own = spaces.subspan(cell.first_space, cell.spaces);
  // The segment's own space, or the latest one of planes before it.
  auto at = std::upper_bound(own.begin(), own.end(), segment,
                             [](std::uint32_t a, const Space& b) { return a < b.segment; });
  const SegmentView& wanted = lane.segments[segment];
  do {
    --at;
  } while (at->segment != segment && !SharesBook(lane.segments[at->segment], wanted));
  return *at;
}

std::uint32_t BlocksOf(const SegmentView& segment) {
  const std::uint32_t block = segment.shape.block;
  return block == 0 ? 0 : segment.entries / block + (segment.entries % block != 0 ? 1 : 0);
}

std::uint32_t BlocksOf(const LaneView& lane) {
  std::uint32_t blocks = 0;
  for (std::uint32_t s = 0; s < lane.segment_count; ++s) blocks += BlocksOf(lane.segments[s]);
  return blocks;
}

PositionRange VisibleFrom(const AttendBatch& batch, std::uint64_t position) {
  const std::uint64_t window = batch.geometry.sliding_window;
  PositionRange range = {.begin = 0, .end = kEveryPosition};
  if (batch.causal && position != kEveryPosition) range.end = position + 1;
  if (window != 0 && position >= window) range.begin = position - window + 1;
  return range;
}

PositionRange VisibleFromRows(const AttendBatch& batch, const AttendItem& item,
                              std::uint32_t first_row, std::uint32_t rows) {
  const std::uint32_t group = batch.geometry.group();
  const std::uint32_t last_row = first_row + rows - 1;
  return {.begin = VisibleFrom(batch, item.first_query_position + first_row / group).begin,
          .end = VisibleFrom(batch, item.first_query_position + last_row / group).end};
}

PositionRange VisibleFromItem(const AttendBatch& batch, const AttendItem& item) {
  return VisibleFromRows(batch, item, 0, item.queries * batch.geometry.group());
}

std::uint64_t BudgetOf(const SelectionRule& rule, const Selectable& visible) {
  std::uint64_t outside = 0;
  if (rule.counts_tail) {
    const std::uint64_t rows = visible.partial + visible.newest;
    outside = (rows + visible.block - 1) / visible.block * visible.block - visible.partial;
  }
  const std::uint64_t all = visible.entries + outside;
  std::uint64_t budget = rule.entries;
  if (budget == 0) {
    // Rates are doubles: a tiny excess of the product over an integer may be a rounding error.
    const double wanted = std::ceil(rule.rate * static_cast<double>(all) - 1e-6);
    if (wanted > 0) {
      budget = wanted < static_cast<double>(all) ? static_cast<std::uint64_t>(wanted) : all;
    }
    budget = std::max(budget, rule.floor);
  }
  return std::min(budget - std::min(budget, outside), visible.entries);
}

PlanSize MeasurePlan(const AttendBatch& batch) {
  PlanSize size;
  ForEachCell(batch, [&](std::uint32_t, const AttendItem& item, std::uint32_t first,
                         std::uint32_t rows, bool sound) {
    const PositionRange visible = VisibleFromRows(batch, item, first, rows);
    ++size.cells;
    if (sound) {
      ForEachSpace(item, visible, [&](std::uint32_t s) {
        ++size.spaces;
        size.query_floats += SpaceFloats(item.lane->segments[s], rows);
      });
    }
    const std::uint64_t tasks = sound ? MostTasks(item, visible) : 1;
    size.tasks += static_cast<std::uint32_t>(tasks);
    size.partial_floats += tasks * PartialFloats(rows, batch.geometry.head_dim);
  });
  return size;
}

void WriteCells(const AttendBatch& batch, std::span<Cell> cells, std::span<Space> spaces) {
  std::uint32_t next_cell = 0;
  std::uint32_t next_space = 0;
  std::uint64_t queries = 0;
  ForEachCell(batch, [&](std::uint32_t index, const AttendItem& item, std::uint32_t first,
                         std::uint32_t rows, bool sound) {
    Cell& cell = cells[next_cell];
    cell.item = index;
    cell.first_row = first;
    cell.rows = rows;
    cell.first_space = next_space;
    cell.faulted.store(!sound, std::memory_order_relaxed);
    if (sound) {
      ForEachSpace(item, VisibleFromRows(batch, item, first, rows), [&](std::uint32_t s) {
        const SegmentView& segment = item.lane->segments[s];
        const std::uint64_t floats = SpaceFloats(segment, rows);
        spaces[next_space++] = {
            .cell = next_cell,
            .segment = s,
            .queries = queries + floats - std::uint64_t{rows} * PaddedChannels(segment.shape),
            .mean_products = queries};
        queries += floats;
      });
    }
    cell.spaces = next_space - cell.first_space;
    ++next_cell;
  });
}

std::uint32_t WriteTasks(const AttendBatch& batch, std::span<const SelectedBlockFlags> taken,
                         std::span<Cell> cells, std::span<Task> tasks) {
  std::uint32_t next_task = 0;
  std::uint64_t partial = 0;
  for (std::uint32_t c = 0; c < cells.size(); ++c) {
    Cell& cell = cells[c];
    const AttendItem& item = batch.items[cell.item];
    cell.first_task = next_task;
    const auto add = [&](std::uint32_t segment, bool selected, std::uint64_t first,
                         std::uint32_t count) {
      tasks[next_task++] = {.cell = c,
                            .segment = segment,
                            .selected = selected,
                            .first = first,
                            .count = count,
                            .partial = partial};
      partial += PartialFloats(cell.rows, batch.geometry.head_dim);
    };
    if (!cell.faulted.load(std::memory_order_relaxed)) {
      ForEachTask(item, VisibleFromRows(batch, item, cell.first_row, cell.rows), taken[cell.item],
                  add);
    }
    if (next_task == cell.first_task) add(kTailSegment, false, 0, 0);
    cell.tasks = next_task - cell.first_task;
    cell.remaining.store(cell.tasks, std::memory_order_relaxed);
  }
  return next_task;
}

}  // namespace tessera::kernels
