#include "kernels/dispatch/attend.h"

#include <algorithm>
#include <memory>

#include "kernels/dispatch/implementation_table.h"
#include "kernels/dispatch/merge_cell.h"
#include "kernels/dispatch/plan.h"
#include "kernels/dispatch/runs.h"
#include "kernels/dispatch/selection.h"
#include "kernels/format/part.h"

namespace tessera::kernels {
namespace {

constexpr std::size_t kAlignment = 64;

constexpr std::size_t AlignUp(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Offsets of the arrays in the workspace.
struct Layout {
  Layout(const AttendBatch& batch, const PlanSize& plan, const SelectionSize& selection)
      : spaces(AlignUp(plan.cells * sizeof(Cell))),
        selections(spaces + AlignUp(plan.spaces * sizeof(Space))),
        score_tasks(selections + AlignUp(selection.items * sizeof(ItemSelection))),
        selection_memory(score_tasks + AlignUp(selection.tasks * sizeof(ScoreTask))),
        taken(selection_memory + AlignUp(selection.bytes)),
        tasks(taken + AlignUp(batch.items.size() * sizeof(SelectedBlockFlags))),
        queries(tasks + AlignUp(plan.tasks * sizeof(Task))),
        partials(queries + AlignUp(plan.query_floats * sizeof(float))),
        bytes(partials + plan.partial_floats * sizeof(float)) {}

  std::size_t spaces;
  std::size_t selections;
  std::size_t score_tasks;
  std::size_t selection_memory;
  std::size_t taken;
  std::size_t tasks;
  std::size_t queries;
  std::size_t partials;
  std::size_t bytes;
};

// The state of one call of Attend or Select, shared by its tasks.
struct Call {
  const Operations* operations;
  Lookahead lookahead;
  const AttendBatch* batch;
  std::span<Cell> cells;
  std::span<Space> spaces;
  std::span<ItemSelection> selections;
  std::span<ScoreTask> score_tasks;
  std::span<SelectedBlockFlags> taken;
  std::span<Task> tasks;
  float* queries;
  float* partials;
  std::atomic<const char*> ran{nullptr};
};

template <class T>
std::span<T> Make(std::byte* at, std::size_t count) {
  T* first = reinterpret_cast<T*>(at);
  std::uninitialized_default_construct_n(first, count);
  return {first, count};
}

// Rotates the cell's queries into the space of a segment.
void FillSpace(const Call& call, const Space& space) {
  const Cell& cell = call.cells[space.cell];
  const AttendBatch& batch = *call.batch;
  const AttendItem& item = batch.items[cell.item];
  const SegmentView& segment = item.lane->segments[space.segment];
  const LayerGeometry& geometry = batch.geometry;
  const std::size_t row_bytes = geometry.head_dim * ElementBytes(geometry.type);
  const std::byte* rows[kMaxPartRows];
  for (std::uint32_t r = 0; r < cell.rows; ++r) {
    const RowPlace place(batch, item, cell.first_row + r);
    rows[r] = static_cast<const std::byte*>(item.query) + place.index * row_bytes;
  }
  const bool rotated = segment.shape.packed() || segment.shape.summary == Summary::kSigns;
  call.operations->rotate({.rotation = rotated ? segment.rotation.key : nullptr,
                           .rotation_type = segment.rotation.type,
                           .channels = segment.shape.key.channels,
                           .head_dim = geometry.head_dim,
                           .rows = rows,
                           .row_type = geometry.type,
                           .row_count = cell.rows,
                           .output = call.queries + space.queries,
                           .padded_channels = PaddedChannels(segment.shape),
                           .mean = segment.rotation.key_mean,
                           .mean_products = call.queries + space.mean_products});
}

// The first ParallelFor: spaces, then the facts of selections. These tasks are independent.
void Prepare(void* context, std::uint32_t index) {
  Call& call = *static_cast<Call*>(context);
  if (index < call.spaces.size()) return FillSpace(call, call.spaces[index]);
  FindBlockFacts(*call.batch, call.selections[index - call.spaces.size()]);
}

// The query rows of a cell in the form that tiles of this shape need.
void ListQueryRows(const Call& call, const Cell& cell, const Task& task, const TileShape& shape,
                   QueryRow* rows) {
  const AttendBatch& batch = *call.batch;
  const AttendItem& item = batch.items[cell.item];
  const std::size_t row_bytes = batch.geometry.head_dim * ElementBytes(batch.geometry.type);
  const Space* space =
      shape.packed() ? &SpaceOf(*item.lane, cell, call.spaces, task.segment) : nullptr;
  const float* rotated = space != nullptr ? call.queries + space->queries : nullptr;
  for (std::uint32_t r = 0; r < cell.rows; ++r) {
    const RowPlace place(batch, item, cell.first_row + r);
    const PositionRange visible = VisibleFrom(batch, item.first_query_position + place.query);
    rows[r] = {.query = rotated != nullptr
                            ? reinterpret_cast<const std::byte*>(
                                  rotated + std::size_t{r} * PaddedChannels(shape))
                            : static_cast<const std::byte*>(item.query) + place.index * row_bytes,
               .visible_begin = visible.begin,
               .visible_end = visible.end,
               .mean_product = shape.planes() ? call.queries[space->mean_products + r] : 0.0f};
  }
}

// The taken flags of the task's segment.
const std::uint8_t* SelectedFlagsOf(const Call& call, const Cell& cell, const Task& task) {
  const std::uint8_t* taken = call.taken[cell.item];
  const LaneView& lane = *call.batch->items[cell.item].lane;
  for (std::uint32_t s = 0; s < task.segment; ++s) taken += BlocksOf(lane.segments[s]);
  return taken;
}

// False if a tile is outside its arena.
bool ComputePart(Call& call, const Cell& cell, const Task& task) {
  const AttendBatch& batch = *call.batch;
  const LayerGeometry& geometry = batch.geometry;
  const AttendItem& item = batch.items[cell.item];
  const TileShape shape = task.segment == kTailSegment
                              ? DenseShape(geometry.head_dim, geometry.type)
                              : item.lane->segments[task.segment].shape;
  RunList list;
  const RunSource source = {.lane = item.lane,
                            .task = &task,
                            .tail_tile = {geometry.head_dim, geometry.type},
                            .visible = VisibleFromRows(batch, item, cell.first_row, cell.rows),
                            .taken = task.selected ? SelectedFlagsOf(call, cell, task) : nullptr};
  if (!ListRuns(source, list)) return false;

  QueryRow rows[kMaxPartRows];
  ListQueryRows(call, cell, task, shape, rows);
  float* base = call.partials + task.partial;
  const AttendPart part = {
      .runs = list.runs,
      .rows = rows,
      .run_count = list.count,
      .row_count = cell.rows,
      .shape = shape,
      .layout = LayoutOf(shape),
      .padded_channels = shape.packed() ? PaddedChannels(shape) : geometry.head_dim,
      .scale = geometry.scale,
      .logit_softcap = geometry.logit_softcap,
      .lookahead = call.lookahead};
  call.ran.store(
      call.operations->attend_part(
          part, {.max = base, .sum = base + kMaxPartRows, .output = base + 2 * kMaxPartRows}),
      std::memory_order_relaxed);
  return true;
}

void RunTask(void* context, std::uint32_t index) {
  Call& call = *static_cast<Call*>(context);
  const Task& task = call.tasks[index];
  Cell& cell = call.cells[task.cell];
  if (task.count != 0 && !ComputePart(call, cell, task)) {
    cell.faulted.store(true, std::memory_order_relaxed);
  }
  // The last task of the cell sees all results and merges them in lane order.
  if (cell.remaining.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  if (cell.faulted.load(std::memory_order_relaxed)) return;
  MergeCell({.operations = call.operations,
             .batch = call.batch,
             .cell = &cell,
             .tasks = call.tasks.subspan(cell.first_task, cell.tasks),
             .partials = call.partials});
}

// Prepares the cells and rotated queries, and selects blocks.
void Begin(Call& call, std::byte* selection_memory, Executor& executor) {
  const AttendBatch& batch = *call.batch;
  WriteCells(batch, call.cells, call.spaces);
  WriteSelections(batch, call.selections, call.score_tasks, selection_memory);
  std::fill(call.taken.begin(), call.taken.end(), nullptr);
  const std::size_t preparations = call.spaces.size() + call.selections.size();
  if (preparations != 0) {
    executor.ParallelFor(static_cast<std::uint32_t>(preparations), Prepare, &call);
  }
  if (call.selections.empty()) return;
  ChooseBlocks({.operations = call.operations,
                .batch = &batch,
                .cells = call.cells,
                .spaces = call.spaces,
                .queries = call.queries,
                .selections = call.selections,
                .tasks = call.score_tasks},
               executor);
  for (const ItemSelection& selection : call.selections) {
    call.taken[selection.item] = selection.taken;
    if (!selection.faulted.load(std::memory_order_relaxed)) continue;
    for (std::uint32_t c = 0; c < selection.cells; ++c) {
      call.cells[selection.first_cell + c].faulted.store(true, std::memory_order_relaxed);
    }
  }
}

// Sets up a call in the caller's workspace, then runs `finish` on it.
template <class Finish>
AttendResult Run(const Implementation& implementation, const AttendBatch& batch,
                 std::span<std::byte> workspace, Executor& executor, Finish finish) {
  AttendResult result = {.implementation = implementation.name()};
  const PlanSize plan = MeasurePlan(batch);
  const SelectionSize selection = MeasureSelections(batch);
  const Layout layout(batch, plan, selection);
  std::byte* memory = workspace.data();
  if (workspace.size() < layout.bytes ||
      reinterpret_cast<std::uintptr_t>(memory) % kAlignment != 0) {
    result.status = AttendStatus::kWorkspaceTooSmall;
    return result;
  }
  Call call = {.operations = &implementation.operations(),
               .lookahead = implementation.lookahead(),
               .batch = &batch,
               .cells = Make<Cell>(memory, plan.cells),
               .spaces = Make<Space>(memory + layout.spaces, plan.spaces),
               .selections = Make<ItemSelection>(memory + layout.selections, selection.items),
               .score_tasks = Make<ScoreTask>(memory + layout.score_tasks, selection.tasks),
               .taken = Make<SelectedBlockFlags>(memory + layout.taken, batch.items.size()),
               .tasks = Make<Task>(memory + layout.tasks, plan.tasks),
               .queries = reinterpret_cast<float*>(memory + layout.queries),
               .partials = reinterpret_cast<float*>(memory + layout.partials)};
  Begin(call, memory + layout.selection_memory, executor);
  finish(call);
  if (const char* ran = call.ran.load(std::memory_order_relaxed)) result.implementation = ran;
  for (const Cell& cell : call.cells) {
    if (!cell.faulted.load(std::memory_order_relaxed)) continue;
    result.status = AttendStatus::kBadTile;
    result.item = cell.item;
    break;
  }
  return result;
}

}  // namespace

std::size_t AttendWorkspaceBytes(const AttendBatch& batch) {
  return Layout(batch, MeasurePlan(batch), MeasureSelections(batch)).bytes;
}

AttendResult Attend(const Implementation& implementation, const AttendBatch& batch,
                    std::span<std::byte> workspace, Executor& executor) {
  return Run(implementation, batch, workspace, executor, [&](Call& call) {
    const std::uint32_t tasks = WriteTasks(batch, call.taken, call.cells, call.tasks);
    if (tasks != 0) executor.ParallelFor(tasks, RunTask, &call);
  });
}

AttendResult Select(const Implementation& implementation, const AttendBatch& batch,
                    std::span<std::byte> workspace, Executor& executor, SelectionSink& sink) {
  return Run(implementation, batch, workspace, executor, [&](Call& call) {
    for (const ItemSelection& selection : call.selections) {
      if (selection.faulted.load(std::memory_order_relaxed)) continue;
      ReportSelection(batch.items[selection.item], selection, sink);
    }
  });
}

}  // namespace tessera::kernels
