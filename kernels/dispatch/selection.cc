#include "kernels/dispatch/selection.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "kernels/dispatch/runs.h"

namespace tessera::kernels {
namespace {

constexpr std::uint64_t kAlignment = 64;

constexpr std::uint64_t AlignUp(std::uint64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

std::uint32_t CellsOf(const AttendBatch& batch, const AttendItem& item) {
  const std::uint64_t rows = std::uint64_t{item.queries} * batch.geometry.group();
  return static_cast<std::uint32_t>((rows + kMaxPartRows - 1) / kMaxPartRows);
}

// Offsets of the arrays of one selection, each 64-byte aligned.
struct Arrays {
  Arrays(const AttendBatch& batch, const AttendItem& item, std::uint32_t blocks)
      : taken(AlignUp(blocks * sizeof(BlockFacts))),
        scores(taken + AlignUp(blocks)),
        values(scores + AlignUp(sizeof(float) * blocks *
                                std::min<std::uint64_t>(kMaxPartRows, std::uint64_t{item.queries} *
                                                                          batch.geometry.group()))),
        bytes(values + AlignUp(sizeof(float) * blocks * (CellsOf(batch, item) + 1ull))) {}

  std::uint64_t taken;
  std::uint64_t scores;
  std::uint64_t values;
  std::uint64_t bytes;
};

// Calls visit(item index, first cell, blocks) for each item that selects.
template <class Visit>
void ForEachSelection(const AttendBatch& batch, Visit visit) {
  std::uint32_t cell = 0;
  for (std::uint32_t i = 0; i < batch.items.size(); ++i) {
    const AttendItem& item = batch.items[i];
    const std::uint32_t first_cell = cell;
    cell += CellsOf(batch, item);
    if (item.selection == nullptr || !IsValidItem(batch, item)) continue;
    const std::uint32_t blocks = BlocksOf(*item.lane);
    if (blocks != 0) visit(i, first_cell, blocks);
  }
}

// Calls add(segment, its first block, first tile, tiles) for each score task of one cell.
template <class Add>
void ForEachScoreTask(const LaneView& lane, Add add) {
  std::uint32_t first_block = 0;
  for (std::uint32_t s = 0; s < lane.segment_count; ++s) {
    const SegmentView& segment = lane.segments[s];
    const std::uint32_t blocks = BlocksOf(segment);
    if (blocks == 0) continue;
    const std::uint32_t per_tile = segment.shape.blocks();
    const std::uint32_t tiles = (blocks + per_tile - 1) / per_tile;
    for (std::uint32_t t = 0; t < tiles; t += kMaxPartRuns) {
      add(s, first_block, t, std::min(kMaxPartRuns, tiles - t));
    }
    first_block += blocks;
  }
}

// How many of the rows [begin, begin + count) of a tile are visible. Reads the tile only if it has
// position words; otherwise `tile` may be null.
std::uint32_t VisibleRows(const SegmentView& segment, const std::byte* tile, std::uint64_t entry,
                          std::uint32_t count, const PositionRange& visible) {
  if (!segment.shape.positions) {
    const std::uint64_t first = segment.first_position + entry;
    const std::uint64_t begin = std::max(first, visible.begin);
    const std::uint64_t end = std::min(first + count, visible.end);
    return end > begin ? static_cast<std::uint32_t>(end - begin) : 0;
  }
  std::uint32_t seen = 0;
  const std::byte* words = tile + LayoutOf(segment.shape).positions;
  for (std::uint32_t i = 0; i < count; ++i) {
    std::uint32_t word;
    std::memcpy(&word, words + (entry % kTileEntries + i) * sizeof(word), sizeof(word));
    if (visible.Covers(segment.first_position + word, 1)) ++seen;
  }
  return seen;
}

// Adds the visible entries to `entries`. False if a tile that had to be read is outside its arena.
bool FindFacts(const SegmentView& segment, const PositionRange& visible, BlockFacts* facts,
               std::uint64_t& entries) {
  const std::uint32_t block = segment.shape.block;
  const std::uint32_t blocks = BlocksOf(segment);
  if (blocks == 0) return true;
  if (visible.Covers(segment.first_position, segment.positions())) {
    std::fill_n(facts, blocks, BlockFacts{.entries = segment.shape.block, .forced = 0});
    facts[blocks - 1].entries = static_cast<std::uint8_t>(segment.entries - (blocks - 1) * block);
    entries += segment.entries;
    return true;
  }
  const std::uint64_t bytes = LayoutOf(segment.shape).bytes;
  const std::byte* tile = nullptr;
  for (std::uint32_t b = 0; b < blocks; ++b) {
    const std::uint32_t entry = b * block;
    const std::uint32_t count = std::min(block, segment.entries - entry);
    if (segment.shape.positions && entry % kTileEntries == 0) {
      tile = ResolveTile(segment, entry / kTileEntries, bytes);
      if (tile == nullptr) return false;
    }
    const std::uint32_t seen = VisibleRows(segment, tile, entry, count, visible);
    facts[b] = {.entries = static_cast<std::uint8_t>(seen), .forced = 0};
    entries += seen;
  }
  return true;
}

std::uint64_t Overlap(const PositionRange& visible, std::uint64_t first, std::uint64_t end) {
  const std::uint64_t from = std::max(first, visible.begin);
  const std::uint64_t to = std::min(end, visible.end);
  return to > from ? to - from : 0;
}

// The visible rows of a lane's unfilled last tile, if its last segment has no summaries yet. Full
// tiles do not count: they get summaries shortly.
std::uint64_t UnblockedRows(const SegmentView& last, const PositionRange& visible) {
  if (last.shape.block != 0 || last.shape.positions) return 0;
  const std::uint64_t end = last.first_position + last.entries;
  return Overlap(visible, end - last.entries % kTileEntries, end);
}

// One round of selection: the same cell index of every selection that has that many cells.
struct Round {
  const SelectionCall* call;
  std::uint32_t cell;  // cell index within each selection
};

void ScoreBlocks(void* context, std::uint32_t index) {
  const Round& round = *static_cast<Round*>(context);
  const SelectionCall& call = *round.call;
  const ScoreTask& task = call.tasks[index];
  ItemSelection& selection = call.selections[task.selection];
  if (round.cell >= selection.cells || selection.faulted.load(std::memory_order_relaxed)) return;
  const AttendItem& item = call.batch->items[selection.item];
  const SegmentView& segment = item.lane->segments[task.segment];
  const Cell& cell = call.cells[selection.first_cell + round.cell];
  const TileLayout layout = LayoutOf(segment.shape);
  const std::uint32_t per_tile = segment.shape.blocks();
  const std::uint32_t blocks = BlocksOf(segment);
  float* scores = selection.scores + task.first_block + std::uint64_t{task.first_tile} * per_tile;
  // The cell's rows do not see this segment: it has no space, and its blocks score -infinity.
  const PositionRange visible = VisibleFromRows(*call.batch, item, cell.first_row, cell.rows);
  if (!visible.Meets(segment.first_position, segment.positions())) {
    const std::uint32_t here = std::min(task.tiles * per_tile, blocks - task.first_tile * per_tile);
    for (std::uint32_t r = 0; r < cell.rows; ++r) {
      std::fill_n(scores + std::uint64_t{r} * selection.blocks, here,
                  -std::numeric_limits<float>::infinity());
    }
    return;
  }
  BlockRun runs[kMaxPartRuns];
  for (std::uint32_t i = 0; i < task.tiles; ++i) {
    const std::uint32_t tile = task.first_tile + i;
    runs[i].tile = ResolveTile(segment, tile, layout.bytes);
    if (runs[i].tile != nullptr) {
      runs[i].summaries = ResolveSummaries(segment, tile, runs[i].tile, layout);
    }
    if (runs[i].tile == nullptr || runs[i].summaries == nullptr) {
      selection.faulted.store(true, std::memory_order_relaxed);
      return;
    }
    runs[i].blocks = std::min(per_tile, blocks - tile * per_tile);
    const std::uint32_t behind =
        std::min((tile * per_tile + runs[i].blocks) * segment.shape.block, segment.entries);
    runs[i].last_entries = behind - (tile * per_tile + runs[i].blocks - 1) * segment.shape.block;
  }
  call.operations->score_part(
      {.runs = runs,
       .run_count = task.tiles,
       .rows = call.queries + SpaceOf(*item.lane, cell, call.spaces, task.segment).queries,
       .row_count = cell.rows,
       .shape = segment.shape,
       .layout = layout,
       .padded_channels = PaddedChannels(segment.shape),
       .scale = call.batch->geometry.scale,
       .scores = scores,
       .score_stride = selection.blocks});
}

std::uint64_t BudgetOf(const SelectionCall& call, const ItemSelection& selection) {
  return BudgetOf(*call.batch->items[selection.item].selection, selection.visible);
}

// Combines the scores of one cell's rows. If the item has a single cell this is also the selection.
void CombineCellScores(const Round& round, ItemSelection& selection) {
  const SelectionCall& call = *round.call;
  const Cell& cell = call.cells[selection.first_cell + round.cell];
  const SelectionRule& rule = *call.batch->items[selection.item].selection;
  const bool alone = selection.cells == 1;
  call.operations->select(
      {.scores = selection.scores,
       .score_stride = selection.blocks,
       .row_count = cell.rows,
       .blocks = selection.facts,
       .block_count = selection.blocks,
       .budget = alone ? BudgetOf(call, selection) : 0,
       // A single row orders blocks the same way with and without its log-sum-exp.
       .by_share = rule.judge == SelectionRule::Judge::kShare && !(alone && cell.rows == 1),
       .values = selection.values + std::uint64_t{round.cell} * selection.blocks,
       .taken = selection.taken});
}

// Selects among the values of several cells, which are treated as rows.
void TakeBlocks(const SelectionCall& call, ItemSelection& selection) {
  call.operations->select(
      {.scores = selection.values,
       .score_stride = selection.blocks,
       .row_count = selection.cells,
       .blocks = selection.facts,
       .block_count = selection.blocks,
       .budget = BudgetOf(call, selection),
       .by_share = false,
       .values = selection.values + std::uint64_t{selection.cells} * selection.blocks,
       .taken = selection.taken});
}

// After the last cell of an item it also selects; no other task depends on the result.
void CombineAndSelect(void* context, std::uint32_t index) {
  const Round& round = *static_cast<Round*>(context);
  ItemSelection& selection = round.call->selections[index];
  if (round.cell >= selection.cells || selection.faulted.load(std::memory_order_relaxed)) return;
  CombineCellScores(round, selection);
  if (selection.cells > 1 && round.cell + 1 == selection.cells) {
    TakeBlocks(*round.call, selection);
  }
}

}  // namespace

void FindBlockFacts(const AttendBatch& batch, ItemSelection& selection) {
  const AttendItem& item = batch.items[selection.item];
  const LaneView& lane = *item.lane;
  const PositionRange visible = VisibleFromItem(batch, item);
  std::uint32_t first = 0;
  for (std::uint32_t s = 0; s < lane.segment_count; ++s) {
    const SegmentView& segment = lane.segments[s];
    if (!FindFacts(segment, visible, selection.facts + first, selection.visible.entries)) {
      selection.faulted.store(true, std::memory_order_relaxed);
      return;
    }
    const std::uint32_t blocks = BlocksOf(segment);
    if (blocks != 0) selection.visible.block = segment.shape.block;
    first += blocks;
  }
  const std::uint64_t tail = Overlap(visible, lane.tail.begin, lane.tail.end);
  const SegmentView& last = lane.segments[lane.segment_count - 1];
  selection.visible.newest = tail + UnblockedRows(last, visible);
  const bool newest = item.selection->counts_tail && tail == 0;
  if (BlocksOf(last) != 0 && (newest || last.entries % last.shape.block != 0)) {
    BlockFacts& facts = selection.facts[selection.blocks - 1];
    facts.forced = 1;
    selection.visible.partial = facts.entries < last.shape.block ? facts.entries : 0;
  }
  if (item.selection->first_block && BlocksOf(lane.segments[0]) != 0) {
    selection.facts[0].forced = 1;
  }
}

SelectionSize MeasureSelections(const AttendBatch& batch) {
  SelectionSize size;
  ForEachSelection(batch, [&](std::uint32_t i, std::uint32_t, std::uint32_t blocks) {
    const AttendItem& item = batch.items[i];
    ++size.items;
    ForEachScoreTask(*item.lane, [&](std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t) {
      ++size.tasks;
    });
    size.bytes += Arrays(batch, item, blocks).bytes;
  });
  return size;
}

void WriteSelections(const AttendBatch& batch, std::span<ItemSelection> selections,
                     std::span<ScoreTask> tasks, std::byte* memory) {
  std::uint32_t next = 0;
  std::uint32_t next_task = 0;
  ForEachSelection(batch, [&](std::uint32_t i, std::uint32_t first_cell, std::uint32_t blocks) {
    const AttendItem& item = batch.items[i];
    const Arrays arrays(batch, item, blocks);
    ItemSelection& selection = selections[next];
    selection.item = i;
    selection.first_cell = first_cell;
    selection.cells = CellsOf(batch, item);
    selection.blocks = blocks;
    selection.facts = reinterpret_cast<BlockFacts*>(memory);
    selection.taken = reinterpret_cast<std::uint8_t*>(memory + arrays.taken);
    selection.scores = reinterpret_cast<float*>(memory + arrays.scores);
    selection.values = reinterpret_cast<float*>(memory + arrays.values);
    memory += arrays.bytes;
    ForEachScoreTask(*item.lane, [&](std::uint32_t segment, std::uint32_t first_block,
                                     std::uint32_t tile, std::uint32_t tiles) {
      tasks[next_task++] = {.selection = next,
                            .segment = segment,
                            .first_block = first_block,
                            .first_tile = tile,
                            .tiles = tiles};
    });
    ++next;
  });
}

void ChooseBlocks(const SelectionCall& call, Executor& executor) {
  const auto items = static_cast<std::uint32_t>(call.selections.size());
  const auto tasks = static_cast<std::uint32_t>(call.tasks.size());
  std::uint32_t most_cells = 0;
  for (const ItemSelection& selection : call.selections) {
    most_cells = std::max(most_cells, selection.cells);
  }
  Round round = {.call = &call, .cell = 0};
  for (; round.cell < most_cells; ++round.cell) {
    executor.ParallelFor(tasks, ScoreBlocks, &round);
    executor.ParallelFor(items, CombineAndSelect, &round);
  }
}

void ReportSelection(const AttendItem& item, const ItemSelection& selection, SelectionSink& sink) {
  std::uint32_t first_block = 0;
  for (std::uint32_t s = 0; s < item.lane->segment_count; ++s) {
    const SegmentView& segment = item.lane->segments[s];
    const std::uint32_t blocks = BlocksOf(segment);
    const std::uint8_t* taken = selection.taken + first_block;
    first_block += blocks;
    for (std::uint32_t b = 0; b < blocks;) {
      if (taken[b] == 0) {
        ++b;
        continue;
      }
      const std::uint32_t first = b;
      while (b < blocks && taken[b] != 0) ++b;
      const std::uint32_t entry = first * segment.shape.block;
      sink.Take(selection.item,
                {.segment = s,
                 .first_entry = entry,
                 .entries = std::min(b * segment.shape.block, segment.entries) - entry});
    }
  }
}

}  // namespace tessera::kernels
