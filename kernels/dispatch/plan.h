// Splits a batch into tasks. The split depends on the shapes, the LaneViews and the selected
// blocks.
//
//   item ──▶ cells: up to kMaxPartRows query rows that are merged together
//   cell ──▶ spaces: one per segment that needs the queries rotated (or widened to fp32)
//   cell ──▶ tasks: one per part that some row of the cell can see, in lane order
//
// All arrays are in the caller's workspace, followed by the rotated queries and partial results.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/dispatch/attend.h"
#include "kernels/dispatch/block_flags.h"

namespace tessera::kernels {

inline constexpr std::uint32_t kTailSegment = ~std::uint32_t{0};

// A part of selected blocks ends at the word of kFlagBlocks blocks in which it reaches this many
// entries, or so many runs that the next word might exceed kMaxPartRuns. Long parts are better,
// because each one starts by waiting for memory. Over planes, entries alone limit a part.
inline constexpr std::uint32_t kSelectedPartEntries = 960;
inline constexpr std::uint32_t kSelectedPartRuns = kMaxPartRuns - kFlagBlocks / 2;
static_assert(kSelectedPartEntries / kMinBlock + kFlagBlocks / 2 <= kMaxQuadRuns);

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
  std::atomic<std::uint32_t> remaining{0};  // the task that decrements it to 0 merges the cell
  std::atomic<bool> faulted{false};         // if set, nothing of the cell is written
};

// A cell's queries in the form a segment needs: kMaxPartRows products with the mean if the segment
// has a book, then [rows][padded channels] in fp32. Segments of planes that share a book share the
// space of the first one.
struct Space {
  std::uint32_t cell = 0;
  std::uint32_t segment = 0;
  std::uint64_t queries = 0;        // offset in floats
  std::uint64_t mean_products = 0;  // likewise
};

struct Task {
  std::uint32_t cell = 0;
  std::uint32_t segment = 0;  // or kTailSegment
  bool selected = false;    // `first` and `count` are blocks, of which only the taken ones are read
  std::uint64_t first = 0;  // first tile of the segment, or token / 32 of the tail
  std::uint32_t count = 0;  // 0: nothing is visible, the task only merges
  std::uint64_t partial = 0;  // offset in floats of its maxima, sums and outputs
};

struct PlanSize {
  std::uint32_t cells = 0;
  std::uint32_t spaces = 0;
  std::uint32_t tasks = 0;  // upper bound
  std::uint64_t query_floats = 0;
  std::uint64_t partial_floats = 0;  // upper bound
};

// The taken blocks of an item's segments with summaries, one byte per block, segment after segment.
// Null: everything is read.
using SelectedBlockFlags = const std::uint8_t*;

PlanSize MeasurePlan(const AttendBatch& batch);

// Fills arrays of the measured size; `cells` must be constructed. Call WriteTasks after WriteCells;
// `taken` has one pointer per item.
void WriteCells(const AttendBatch& batch, std::span<Cell> cells, std::span<Space> spaces);
// Returns the number of tasks written.
std::uint32_t WriteTasks(const AttendBatch& batch, std::span<const SelectedBlockFlags> taken,
                         std::span<Cell> cells, std::span<Task> tasks);

// Whether kernels support the item's lane and rule. Tile offsets are checked later, when they are
// read.
bool IsValidItem(const AttendBatch& batch, const AttendItem& item);

// The space of a cell for a segment of `lane` that needs one.
const Space& SpaceOf(const LaneView& lane, const Cell& cell, std::span<const Space> spaces,
                     std::uint32_t segment);

// Whether two segments are planes with the same book.
bool SharesBook(const SegmentView& a, const SegmentView& b);

// The blocks of a segment, the last one possibly partial; 0 without summaries.
std::uint32_t BlocksOf(const SegmentView& segment);
// The blocks of all segments of a lane.
std::uint32_t BlocksOf(const LaneView& lane);

// The positions visible to a query at `position`.
PositionRange VisibleFrom(const AttendBatch& batch, std::uint64_t position);

// The positions visible to any of the rows [first_row, first_row + rows) of an item.
PositionRange VisibleFromRows(const AttendBatch& batch, const AttendItem& item,
                              std::uint32_t first_row, std::uint32_t rows);
// The positions visible to any query of an item.
PositionRange VisibleFromItem(const AttendBatch& batch, const AttendItem& item);

// The visible entries that a selection rule's budget is computed from.
struct Selectable {
  std::uint64_t entries = 0;  // in segments with block summaries
  std::uint64_t newest = 0;   // after the last block (less than a tile), and in the tail
  std::uint32_t partial = 0;  // in the last block, if it is always taken and not full
  std::uint32_t block = 1;    // block size in which the newest entries are counted
};

// The part of a rule's budget that is left for segments.
std::uint64_t BudgetOf(const SelectionRule& rule, const Selectable& visible);

// The floats of one task's partial result. Maxima and sums are padded to keep outputs aligned.
// Rotated rows have at most head_dim channels, including padding.
constexpr std::uint64_t PartialFloats(std::uint32_t rows, std::uint32_t head_dim) {
  return 2 * kMaxPartRows + std::uint64_t{rows} * head_dim;
}

}  // namespace tessera::kernels
