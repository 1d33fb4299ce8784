#include "kernels/dispatch/attend.h"

#include <algorithm>
#include <limits>
#include <memory>

#include "kernels/dispatch/implementation_table.h"
#include "kernels/dispatch/merge.h"
#include "kernels/dispatch/numerics.h"
#include "kernels/dispatch/plan.h"
#include "kernels/dispatch/runs.h"
#include "kernels/format/part.h"

namespace tessera::kernels {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

constexpr std::size_t AlignUp(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// The workspace: cells, tasks, partial results.
struct Layout {
  explicit Layout(const PlanSize& size)
      : tasks(AlignUp(size.cells * sizeof(Cell))),
        partials(tasks + AlignUp(size.tasks * sizeof(Task))),
        bytes(partials + size.partial_floats * sizeof(float)) {}

  std::size_t tasks;
  std::size_t partials;
  std::size_t bytes;
};

// One call of Attend, shared by its tasks.
struct Call {
  const Operations* operations;
  const AttendBatch* batch;
  std::span<Cell> cells;
  std::span<Task> tasks;
  float* partials;
  std::atomic<const char*> ran{nullptr};

  PartialRows PartialOf(const Task& task) const {
    float* base = partials + task.partial;
    return {.max = base, .sum = base + kMaxPartRows, .output = base + 2 * kMaxPartRows};
  }
};

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

// False where a tile is outside its arena.
bool ComputePart(Call& call, const Cell& cell, const Task& task) {
  const AttendBatch& batch = *call.batch;
  const LayerGeometry& geometry = batch.geometry;
  const AttendItem& item = batch.items[cell.item];
  const DenseTile tile{geometry.head_dim, geometry.type};

  RunList list;
  const PositionRange seen = VisibleFromRows(batch, item, cell.first_row, cell.rows);
  if (!ListRuns(*item.lane, task, tile, seen, list)) return false;

  QueryRow rows[kMaxPartRows];
  for (std::uint32_t r = 0; r < cell.rows; ++r) {
    const RowPlace place(batch, item, cell.first_row + r);
    const PositionRange visible = VisibleFrom(batch, item.first_query_position + place.query);
    rows[r] = {.query = static_cast<const std::byte*>(item.query) + place.index * tile.row_bytes(),
               .visible_begin = visible.begin,
               .visible_end = visible.end};
  }
  const AttendPart part = {.runs = list.runs,
                           .rows = rows,
                           .run_count = list.count,
                           .row_count = cell.rows,
                           .shape = DenseShape(geometry.head_dim, geometry.type),
                           .layout = LayoutOf(DenseShape(geometry.head_dim, geometry.type)),
                           .padded_channels = geometry.head_dim,
                           .scale = geometry.scale,
                           .logit_softcap = geometry.logit_softcap};
  call.ran.store(call.operations->attend_part(part, call.PartialOf(task)),
                 std::memory_order_relaxed);
  return true;
}

void MergeRow(const Call& call, const Cell& cell, std::uint32_t row) {
  const AttendBatch& batch = *call.batch;
  const AttendItem& item = batch.items[cell.item];
  const RowPlace place(batch, item, cell.first_row + row);
  const float* sinks = batch.geometry.sinks;
  const double sink = sinks == nullptr ? -kInfinity : sinks[place.head] * kLog2E;

  const std::span<const Task> tasks = call.tasks.subspan(cell.first_task, cell.tasks);
  double max = sink;
  for (const Task& task : tasks) {
    if (task.tiles != 0) max = std::max<double>(max, call.PartialOf(task).max[row]);
  }
  RowMerge merge(max, batch.geometry.head_dim);
  for (const Task& task : tasks) {
    if (task.tiles != 0) merge.AddPartial(call.PartialOf(task), row);
  }
  merge.AddSink(sink);

  const std::size_t row_bytes = batch.geometry.head_dim * ElementBytes(batch.output_type);
  const float lse = merge.Finish(batch.output_type,
                                 static_cast<std::byte*>(item.output) + place.index * row_bytes);
  if (item.lse != nullptr) item.lse[place.index] = lse;
}

void RunTask(void* context, std::uint32_t index) {
  Call& call = *static_cast<Call*>(context);
  const Task& task = call.tasks[index];
  Cell& cell = call.cells[task.cell];
  if (task.tiles != 0 && !ComputePart(call, cell, task)) {
    cell.faulted.store(true, std::memory_order_relaxed);
  }
  // The last one to arrive sees what the others wrote, and merges in lane order.
  if (cell.remaining.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  if (cell.faulted.load(std::memory_order_relaxed)) return;
  for (std::uint32_t r = 0; r < cell.rows; ++r) MergeRow(call, cell, r);
}

}  // namespace

std::size_t AttendWorkspaceBytes(const AttendBatch& batch) {
  return Layout(MeasurePlan(batch)).bytes;
}

AttendResult Attend(const Implementation& implementation, const AttendBatch& batch,
                    std::span<std::byte> workspace, Executor& executor) {
  AttendResult result = {.implementation = implementation.name()};
  const PlanSize size = MeasurePlan(batch);
  const Layout layout(size);
  if (workspace.size() < layout.bytes ||
      reinterpret_cast<std::uintptr_t>(workspace.data()) % kAlignment != 0) {
    result.status = AttendStatus::kWorkspaceTooSmall;
    return result;
  }
  auto* cells = reinterpret_cast<Cell*>(workspace.data());
  auto* tasks = reinterpret_cast<Task*>(workspace.data() + layout.tasks);
  std::uninitialized_default_construct_n(cells, size.cells);
  std::uninitialized_default_construct_n(tasks, size.tasks);
  Call call = {.operations = &implementation.operations(),
               .batch = &batch,
               .cells = {cells, size.cells},
               .tasks = {tasks, size.tasks},
               .partials = reinterpret_cast<float*>(workspace.data() + layout.partials)};
  WritePlan(batch, call.cells, call.tasks);
  if (size.tasks != 0) executor.ParallelFor(size.tasks, RunTask, &call);

  if (const char* ran = call.ran.load(std::memory_order_relaxed)) result.implementation = ran;
  for (const Cell& cell : call.cells) {
    if (!cell.faulted.load(std::memory_order_relaxed)) continue;
    result.status = AttendStatus::kBadTile;
    result.item = cell.item;
    break;
  }
  return result;
}

}  // namespace tessera::kernels
