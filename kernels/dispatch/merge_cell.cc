#include "kernels/dispatch/merge_cell.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "kernels/dispatch/merge.h"
#include "kernels/dispatch/numerics.h"

namespace tessera::kernels {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

const SegmentView* PackedSegmentOf(const AttendItem& item, const Task& task) {
  if (task.segment == kTailSegment) return nullptr;
  const SegmentView& segment = item.lane->segments[task.segment];
  return segment.shape.packed() ? &segment : nullptr;
}

// Calls visit(partial, its segment) for each part that is merged in the space of the first part
// before that is rotated back: parts of its segment, and of planes that share its book.
template <class Visit>
void ForEachPartOfSpace(const CellResults& results, std::span<const Task> tasks, Visit visit) {
  const LaneView& lane = *results.batch->items[results.cell->item].lane;
  const std::uint32_t first = tasks[0].segment;
  for (const Task& task : tasks) {
    if (task.segment == kTailSegment || task.count == 0) continue;
    if (task.segment == first || SharesBook(lane.segments[first], lane.segments[task.segment])) {
      visit(results.PartialOf(task), task.segment);
    }
  }
}

// Whether a task before `index` has merged this one into its space.
bool IsMergedEarlier(const CellResults& results, std::size_t index) {
  const LaneView& lane = *results.batch->items[results.cell->item].lane;
  const SegmentView& own = lane.segments[results.tasks[index].segment];
  for (const Task& task : results.tasks.first(index)) {
    if (task.segment != kTailSegment && task.count != 0 &&
        SharesBook(lane.segments[task.segment], own)) {
      return true;
    }
  }
  return false;
}

// Merges the parts of one space into the first, row by row; those of other segments become neutral.
// `tasks` begins with the first part and extends to the cell's last task.
void MergeParts(const CellResults& results, std::span<const Task> tasks, std::uint32_t channels) {
  const PartialRows into = results.PartialOf(tasks[0]);
  for (std::uint32_t r = 0; r < results.cell->rows; ++r) {
    double max = -kInfinity;
    ForEachPartOfSpace(results, tasks, [&](const PartialRows& partial, std::uint32_t) {
      max = std::max<double>(max, partial.max[r]);
    });
    double sum = 0;
    double output[kMaxMergeHeadDim] = {};
    ForEachPartOfSpace(results, tasks, [&](const PartialRows& partial, std::uint32_t segment) {
      if (partial.sum[r] == 0) return;  // the neutral element; NaN does not match
      const double weight = Exp2(partial.max[r] - max);
      sum += weight * partial.sum[r];
      const float* row = partial.output + std::size_t{r} * channels;
      for (std::uint32_t c = 0; c < channels; ++c) output[c] += weight * row[c];
      if (segment == tasks[0].segment) return;
      partial.max[r] = static_cast<float>(-kInfinity);
      partial.sum[r] = 0;
    });
    into.max[r] = static_cast<float>(max);
    into.sum[r] = static_cast<float>(sum);
    float* row = into.output + std::size_t{r} * channels;
    for (std::uint32_t c = 0; c < channels; ++c) row[c] = static_cast<float>(output[c]);
  }
}

// Rotates the rows of a partial result back in place: [rows][channels] becomes [rows][head_dim].
void RotateBack(const CellResults& results, const SegmentView& segment,
                const PartialRows& partial) {
  const std::uint32_t padded = PaddedChannels(segment.shape);
  const std::uint32_t head_dim = results.batch->geometry.head_dim;
  alignas(64) float rotated[kMaxPartRows * kMaxMergeHeadDim];
  std::memcpy(rotated, partial.output, sizeof(float) * results.cell->rows * padded);
  results.operations->unrotate({.rotation = segment.rotation.value,
                                .rotation_type = segment.rotation.type,
                                .channels = segment.shape.value.channels,
                                .head_dim = head_dim,
                                .rows = rotated,
                                .padded_channels = padded,
                                .row_count = results.cell->rows,
                                .output = partial.output,
                                .mean = segment.rotation.value_mean,
                                .weights = partial.sum});
}

// Calls visit(index of the first task, segment) for each group of tasks that merge as one: all
// parts of a packed segment, or a single task.
template <class Visit>
void ForEachResult(const CellResults& results, Visit visit) {
  const AttendItem& item = results.batch->items[results.cell->item];
  for (std::size_t i = 0; i < results.tasks.size();) {
    std::size_t end = i + 1;
    const SegmentView* segment = PackedSegmentOf(item, results.tasks[i]);
    if (segment != nullptr) {
      while (end < results.tasks.size() && results.tasks[end].segment == results.tasks[i].segment) {
        ++end;
      }
    }
    if (results.tasks[i].count != 0) visit(i, segment);
    i = end;
  }
}

void MergeRow(const CellResults& results, std::uint32_t row) {
  const AttendBatch& batch = *results.batch;
  const AttendItem& item = batch.items[results.cell->item];
  const RowPlace place(batch, item, results.cell->first_row + row);
  const float* sinks = batch.geometry.sinks;
  const double sink = sinks == nullptr ? -kInfinity : sinks[place.head] * kLog2E;

  double max = sink;
  ForEachResult(results, [&](std::size_t first, const SegmentView*) {
    max = std::max<double>(max, results.PartialOf(results.tasks[first]).max[row]);
  });
  RowMerge merge(max, batch.geometry.head_dim);
  ForEachResult(results, [&](std::size_t first, const SegmentView*) {
    merge.AddPartial(results.PartialOf(results.tasks[first]), row);
  });
  merge.AddSink(sink);

  const std::size_t row_bytes = batch.geometry.head_dim * ElementBytes(batch.output_type);
  const float lse = merge.Finish(batch.output_type,
                                 static_cast<std::byte*>(item.output) + place.index * row_bytes);
  if (item.lse != nullptr) item.lse[place.index] = lse;
}

}  // namespace

void MergeCell(const CellResults& results) {
  ForEachResult(results, [&](std::size_t first, const SegmentView* segment) {
    if (segment == nullptr) return;
    if (segment->shape.planes() && IsMergedEarlier(results, first)) return;
    MergeParts(results, results.tasks.subspan(first), PaddedChannels(segment->shape));
    RotateBack(results, *segment, results.PartialOf(results.tasks[first]));
  });
  for (std::uint32_t r = 0; r < results.cell->rows; ++r) MergeRow(results, r);
}

}  // namespace tessera::kernels
