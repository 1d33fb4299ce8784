// Merges the partial results of a cell's tasks into its rows of the output.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/dispatch/plan.h"
#include "kernels/format/operations.h"
#include "kernels/format/part.h"

namespace tessera::kernels {

// The place of a cell's row in the item's tensors.
struct RowPlace {
  RowPlace(const AttendBatch& batch, const AttendItem& item, std::uint32_t row) {
    const std::uint32_t group = batch.geometry.group();
    query = row / group;
    head = item.kv_head * group + row % group;
    index = std::size_t{query} * batch.geometry.query_heads + head;
  }

  std::uint32_t query;
  std::uint32_t head;
  std::size_t index;  // row index in [queries][query_heads]
};

struct CellResults {
  const Operations* operations;
  const AttendBatch* batch;
  const Cell* cell;
  std::span<const Task> tasks;  // the tasks of `cell`
  float* partials;              // base that Task::partial is relative to

  PartialRows PartialOf(const Task& task) const {
    float* base = partials + task.partial;
    return {.max = base, .sum = base + kMaxPartRows, .output = base + 2 * kMaxPartRows};
  }
};

// Merges the parts of each packed segment in the segment's space, and of all segments of planes
// that share a book, and rotates the sum back once. Then merges everything in lane order, the sink
// last. Overwrites the partial results.
void MergeCell(const CellResults& results);

}  // namespace tessera::kernels
