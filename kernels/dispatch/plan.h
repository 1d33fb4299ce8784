// How a batch becomes tasks. The cut depends on the shapes, the LaneViews and what was selected.
//
//   item ──▶ cells: up to kMaxPartRows query rows that merge together
//   cell ──▶ spaces: one per segment for which the rows' queries are rotated (or widened to fp32)
//   cell ──▶ tasks: one per part that some row of the cell can see, in lane order
//
// All lie in the caller's workspace, followed by the rotated queries and the partial results.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/dispatch/attend.h"
#include "kernels/dispatch/block_flags.h"

namespace tessera::kernels {

inline constexpr std::uint32_t kTailSegment = ~std::uint32_t{0};

// A part of selected blocks ends with the kFlagBlocks in which it reaches this many entries, or so
// many runs that those of further blocks might be too many. Long parts, since each begins by
// waiting for memory.
inline constexpr std::uint32_t kSelectedPartEntries = 960;
inline constexpr std::uint32_t kSelectedPartRuns = kMaxPartRuns - kFlagBlocks / 2;

// Positions [begin, end).
struct PositionRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  bool Meets(std::uint64_t first, std::uint64_t count) const {
    return count != 0 && first < end && (first >= begin || begin - first < count);
  }
  bool Covers(std::uint64_t first, std::uint64_t count) const {
    return first >= begin && first <= end && count <= end - first;
  }
};

struct Cell {
  std::uint32_t item = 0;
  std::uint32_t first_row = 0;  // row = query * group + head of the group
  std::uint32_t rows = 0;
  std::uint32_t first_space = 0;
  std::uint32_t spaces = 0;
  std::uint32_t first_task = 0;
  std::uint32_t tasks = 0;
  std::atomic<std::uint32_t> remaining{0};  // whoever takes it to 0 merges the cell
  std::atomic<bool> faulted{false};         // nothing of the cell is written
};

// The queries of a cell as a segment wants them: [rows][padded channels] in fp32.
struct Space {
  std::uint32_t cell = 0;
  std::uint32_t segment = 0;
  std::uint64_t queries = 0;  // offset in floats
};

struct Task {
  std::uint32_t cell = 0;
  std::uint32_t segment = 0;  // or kTailSegment
  bool selected = false;      // `first` and `count` are blocks, of which the taken ones are read
  std::uint64_t first = 0;    // tile of the segment; of the tail: token / 32
  std::uint32_t count = 0;    // 0: nothing visible, the task only merges
  std::uint64_t partial = 0;  // offset in floats of its maxima, sums and outputs
};

struct PlanSize {
  std::uint32_t cells = 0;
  std::uint32_t spaces = 0;
  std::uint32_t tasks = 0;  // at most
  std::uint64_t query_floats = 0;
  std::uint64_t partial_floats = 0;  // at most
};

// Which blocks of an item's summarised segments are read: one byte per block, segment after
// segment. Null: everything is.
using TakenBlocks = const std::uint8_t*;

PlanSize MeasurePlan(const AttendBatch& batch);

// Fill arrays of the measured size; `cells` has been constructed. Tasks come second: `taken` has
// one pointer per item.
void WriteCells(const AttendBatch& batch, std::span<Cell> cells, std::span<Space> spaces);
// Returns how many tasks there are.
std::uint32_t WriteTasks(const AttendBatch& batch, std::span<const TakenBlocks> taken,
                         std::span<Cell> cells, std::span<Task> tasks);

// Whether a kernel may follow the item's lane, by the item's rule. Tile offsets are checked later,
// where they are read.
bool ItemIsSound(const AttendBatch& batch, const AttendItem& item);

// The space of a cell for a segment that needs one.
const Space& SpaceOf(const Cell& cell, std::span<const Space> spaces, std::uint32_t segment);

// Blocks of a segment's tiles, the last one perhaps partial; 0 without summaries.
std::uint32_t BlocksOf(const SegmentView& segment);
// Of all segments of a lane.
std::uint32_t BlocksOf(const LaneView& lane);

// What one query at `position` sees.
PositionRange VisibleFrom(const AttendBatch& batch, std::uint64_t position);

// What the queries of rows [first_row, first_row + rows) of an item see together.
PositionRange VisibleFromRows(const AttendBatch& batch, const AttendItem& item,
                              std::uint32_t first_row, std::uint32_t rows);
// What all queries of an item see together.
PositionRange VisibleFromItem(const AttendBatch& batch, const AttendItem& item);

// What a rule's budget has to go round: entries that the item's queries see.
struct Selectable {
  std::uint64_t entries = 0;  // of segments with block summaries
  std::uint64_t newest = 0;   // behind the last block, up to a tile, and in the tail
  std::uint32_t partial = 0;  // of the last block, where it is taken anyway and not full
  std::uint32_t block = 1;    // that the newest count in
};

// Of a rule's budget what is left for segments.
std::uint64_t BudgetOf(const SelectionRule& rule, const Selectable& visible);

// The floats of one task's partial result: maxima and sums padded so that outputs are aligned.
// Rotated rows have at most head_dim channels, padding included.
constexpr std::uint64_t PartialFloats(std::uint32_t rows, std::uint32_t head_dim) {
  return 2 * kMaxPartRows + std::uint64_t{rows} * head_dim;
}

}  // namespace tessera::kernels
