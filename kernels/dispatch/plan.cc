#include "kernels/dispatch/plan.h"

#include <algorithm>
#include <limits>

namespace tessera::kernels {
namespace {

constexpr std::uint64_t kEveryPosition = std::numeric_limits<std::uint64_t>::max();

// A lane that no kernel may follow. Tile offsets are checked later, where they are read.
bool LaneIsSound(const AttendBatch& batch, const LaneView& lane) {
  for (std::uint32_t s = 0; s < lane.segment_count; ++s) {
    if (lane.segments[s].shape.format != DenseFormat(batch.geometry.type)) return false;
  }
  const TailView& tail = lane.tail;
  return tail.end >= tail.begin &&
         tail.end - tail.begin <= std::uint64_t{tail.ring_tiles} * kTileEntries;
}

// Calls add(segment, first_tile, tiles) for each part of entries that `visible` meets.
template <class Add>
void ForEachPart(const LaneView& lane, const PositionRange& visible, Add add) {
  for (std::uint32_t s = 0; s < lane.segment_count; ++s) {
    const SegmentView& segment = lane.segments[s];
    if (!visible.Meets(segment.first_position, segment.entries)) continue;
    const std::uint64_t first =
        visible.begin > segment.first_position ? visible.begin - segment.first_position : 0;
    const std::uint64_t last =
        std::min<std::uint64_t>(segment.entries, visible.end - segment.first_position) - 1;
    const std::uint64_t tiles = (std::uint64_t{segment.entries} + kTileEntries - 1) / kTileEntries;
    for (std::uint64_t part = first / kPartEntries; part <= last / kPartEntries; ++part) {
      const std::uint64_t tile = part * kMaxPartRuns;
      add(s, tile, static_cast<std::uint32_t>(std::min<std::uint64_t>(kMaxPartRuns, tiles - tile)));
    }
  }
  const TailView& tail = lane.tail;
  if (!visible.Meets(tail.begin, tail.end - tail.begin)) return;
  const std::uint64_t end_tile = (tail.end - 1) / kTileEntries + 1;
  for (std::uint64_t tile = tail.begin / kTileEntries; tile < end_tile; tile += kMaxPartRuns) {
    const std::uint64_t tiles = std::min<std::uint64_t>(kMaxPartRuns, end_tile - tile);
    if (!visible.Meets(tile * kTileEntries, tiles * kTileEntries)) continue;
    add(kTailSegment, tile, static_cast<std::uint32_t>(tiles));
  }
}

// Walks the whole batch: begin_cell, then that cell's add_task calls. A cell that sees nothing has
// one task without tiles, which merges it.
template <class Sink>
void Walk(const AttendBatch& batch, Sink& sink) {
  const std::uint32_t group = batch.geometry.group();
  for (std::uint32_t i = 0; i < batch.items.size(); ++i) {
    const AttendItem& item = batch.items[i];
    const bool sound = LaneIsSound(batch, *item.lane);
    const std::uint32_t rows = item.queries * group;
    for (std::uint32_t first = 0; first < rows; first += kMaxPartRows) {
      const std::uint32_t count = std::min(kMaxPartRows, rows - first);
      sink.BeginCell(i, first, count, !sound);
      bool empty = true;
      if (sound) {
        ForEachPart(*item.lane, VisibleFromRows(batch, item, first, count),
                    [&](std::uint32_t segment, std::uint64_t tile, std::uint32_t tiles) {
                      sink.AddTask(segment, tile, tiles);
                      empty = false;
                    });
      }
      if (empty) sink.AddTask(kTailSegment, 0, 0);
    }
  }
}

class Measurer {
 public:
  explicit Measurer(std::uint32_t head_dim) : head_dim_(head_dim) {}

  void BeginCell(std::uint32_t, std::uint32_t, std::uint32_t rows, bool) {
    rows_ = rows;
    ++size.cells;
  }
  void AddTask(std::uint32_t, std::uint64_t, std::uint32_t) {
    ++size.tasks;
    size.partial_floats += PartialFloats(rows_, head_dim_);
  }

  PlanSize size;

 private:
  std::uint32_t head_dim_;
  std::uint32_t rows_ = 0;
};

class Writer {
 public:
  Writer(std::uint32_t head_dim, std::span<Cell> cells, std::span<Task> tasks)
      : head_dim_(head_dim), cells_(cells), tasks_(tasks) {}

  void BeginCell(std::uint32_t item, std::uint32_t first_row, std::uint32_t rows, bool faulted) {
    cell_ = &cells_[next_cell_++];
    cell_->item = item;
    cell_->first_row = first_row;
    cell_->rows = rows;
    cell_->first_task = next_task_;
    cell_->faulted.store(faulted, std::memory_order_relaxed);
  }
  void AddTask(std::uint32_t segment, std::uint64_t first_tile, std::uint32_t tiles) {
    tasks_[next_task_++] = {.cell = next_cell_ - 1,
                            .segment = segment,
                            .first_tile = first_tile,
                            .tiles = tiles,
                            .partial = partial_};
    partial_ += PartialFloats(cell_->rows, head_dim_);
    cell_->remaining.store(++cell_->tasks, std::memory_order_relaxed);
  }

 private:
  std::uint32_t head_dim_;
  std::span<Cell> cells_;
  std::span<Task> tasks_;
  Cell* cell_ = nullptr;
  std::uint32_t next_cell_ = 0;
  std::uint32_t next_task_ = 0;
  std::uint64_t partial_ = 0;
};

}  // namespace

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

PlanSize MeasurePlan(const AttendBatch& batch) {
  Measurer measurer(batch.geometry.head_dim);
  Walk(batch, measurer);
  return measurer.size;
}

void WritePlan(const AttendBatch& batch, std::span<Cell> cells, std::span<Task> tasks) {
  Writer writer(batch.geometry.head_dim, cells, tasks);
  Walk(batch, writer);
}

}  // namespace tessera::kernels
