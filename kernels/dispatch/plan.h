// How a batch becomes tasks. The cut depends on the shapes and the LaneViews alone.
//
//   item ──▶ cells: up to kMaxPartRows query rows that merge together
//   cell ──▶ tasks: one per part that some row of the cell can see, in lane order
//
// Cells and tasks lie in the caller's workspace, followed by the partial results of the tasks.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/dispatch/attend.h"

namespace tessera::kernels {

inline constexpr std::uint32_t kTailSegment = ~std::uint32_t{0};

// Positions [begin, end).
struct PositionRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  bool Meets(std::uint64_t first, std::uint64_t count) const {
    return count != 0 && first < end && (first >= begin || begin - first < count);
  }
};

struct Cell {
  std::uint32_t item = 0;
  std::uint32_t first_row = 0;  // row = query * group + head of the group
  std::uint32_t rows = 0;
  std::uint32_t first_task = 0;
  std::uint32_t tasks = 0;
  std::atomic<std::uint32_t> remaining{0};  // whoever takes it to 0 merges the cell
  std::atomic<bool> faulted{false};         // nothing of the cell is written
};

struct Task {
  std::uint32_t cell = 0;
  std::uint32_t segment = 0;     // or kTailSegment
  std::uint64_t first_tile = 0;  // of the segment; of the tail: token / 32
  std::uint32_t tiles = 0;       // 0: nothing visible, the task only merges
  std::uint64_t partial = 0;     // offset in floats of its maxima, sums and outputs
};

struct PlanSize {
  std::uint32_t cells = 0;
  std::uint32_t tasks = 0;
  std::uint64_t partial_floats = 0;
};

PlanSize MeasurePlan(const AttendBatch& batch);

// Fills arrays of the measured size; `cells` has been constructed.
void WritePlan(const AttendBatch& batch, std::span<Cell> cells, std::span<Task> tasks);

// What one query at `position` sees.
PositionRange VisibleFrom(const AttendBatch& batch, std::uint64_t position);

// What the queries of rows [first_row, first_row + rows) of an item see together.
PositionRange VisibleFromRows(const AttendBatch& batch, const AttendItem& item,
                              std::uint32_t first_row, std::uint32_t rows);

// The floats of one task's partial result: maxima and sums padded so that outputs are aligned.
constexpr std::uint64_t PartialFloats(std::uint32_t rows, std::uint32_t head_dim) {
  return 2 * kMaxPartRows + std::uint64_t{rows} * head_dim;
}

}  // namespace tessera::kernels
