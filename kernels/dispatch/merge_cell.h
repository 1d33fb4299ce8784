// From the partial results of a cell's tasks to its rows of the output.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/dispatch/plan.h"
#include "kernels/format/operations.h"
#include "kernels/format/part.h"

namespace tessera::kernels {

// Where a row of a cell stands in the item's tensors.
struct RowPlace {
  RowPlace(const AttendBatch& batch, const AttendItem& item, std::uint32_t row) {
    const std::uint32_t group = batch.geometry.group();
    query = row / group;
    head = item.kv_head * group + row % group;
    index = std::size_t{query} * batch.geometry.query_heads + head;
  }

  std::uint32_t query;
  std::uint32_t head;
  std::size_t index;  // of the row in [queries][query_heads]
};

struct CellResults {
  const Operations* operations;
  const AttendBatch* batch;
  const Cell* cell;
  std::span<const Task> tasks;  // of the cell
  float* partials;              // what Task::partial counts from

  PartialRows PartialOf(const Task& task) const {
    float* base = partials + task.partial;
    return {.max = base, .sum = base + kMaxPartRows, .output = base + 2 * kMaxPartRows};
  }
};

// Merges each packed segment's parts in its own space and rotates the sum back, once; then merges
// everything in lane order, sinks last. Overwrites partial results.
void MergeCell(const CellResults& results);

}  // namespace tessera::kernels
