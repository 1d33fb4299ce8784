// Which blocks the items of a batch read: scores, and the choice among them.
//
//   facts     per block: how many entries of it the item's queries see; forced or not
//   cell by cell of each item:
//     scores  [rows][blocks], by the score kernel, a part of a segment at a time
//     values  [blocks], what the cell's rows say of each block together
//   taken     from the values of all cells
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/dispatch/plan.h"
#include "kernels/format/operations.h"

namespace tessera::kernels {

// One item that has a rule, a sound lane and something to choose from.
struct ItemSelection {
  std::uint32_t item = 0;
  std::uint32_t first_cell = 0;
  std::uint32_t cells = 0;
  std::uint32_t blocks = 0;
  Selectable visible;
  BlockFacts* facts = nullptr;    // [blocks]
  std::uint8_t* taken = nullptr;  // [blocks]
  float* scores = nullptr;        // [rows of a cell][blocks], reused from cell to cell
  float* values = nullptr;        // [cells + 1][blocks]; the last are scratch
  std::atomic<bool> faulted{false};
};

// Blocks of up to kMaxPartRuns tiles of one segment.
struct ScoreTask {
  std::uint32_t selection = 0;
  std::uint32_t segment = 0;
  std::uint32_t first_block = 0;  // among the item's blocks: of the segment's first
  std::uint32_t first_tile = 0;
  std::uint32_t tiles = 0;
};

struct SelectionSize {
  std::uint32_t items = 0;
  std::uint32_t tasks = 0;
  std::uint64_t bytes = 0;  // facts, taken, scores and values of all items
};

SelectionSize MeasureSelections(const AttendBatch& batch);

// Fills arrays of the measured size; `selections` has been constructed, `memory` is 64-byte
// aligned.
void WriteSelections(const AttendBatch& batch, std::span<ItemSelection> selections,
                     std::span<ScoreTask> tasks, std::byte* memory);

// Fills the facts of one selection; faults it where a tile that must be read is not in its arena.
// Before its blocks are chosen.
void FindBlockFacts(const AttendBatch& batch, ItemSelection& selection);

// What choosing needs of the call.
struct SelectionCall {
  const Operations* operations;
  const AttendBatch* batch;
  std::span<const Cell> cells;
  std::span<const Space> spaces;
  const float* queries;
  std::span<ItemSelection> selections;
  std::span<const ScoreTask> tasks;
};

// Decides `taken` of every selection. Those with a bad tile are faulted.
void ChooseBlocks(const SelectionCall& call, Executor& executor);

// The runs of what was taken, in lane order.
void ReportSelection(const AttendItem& item, const ItemSelection& selection, SelectionSink& sink);

}  // namespace tessera::kernels
