// Selects the blocks that the items of a batch read.
//
//   facts     per block: number of entries visible to the item's queries, and whether it is forced
//   for each cell of an item:
//     scores  [rows][blocks], from the score kernel, a part of a segment at a time
//     values  [blocks], the scores of the cell's rows combined
//   taken     from the values of all cells
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/dispatch/plan.h"
#include "kernels/format/operations.h"

namespace tessera::kernels {

// The selection of one item that has a rule, a valid lane and at least one block.
struct ItemSelection {
  std::uint32_t item = 0;
  std::uint32_t first_cell = 0;
  std::uint32_t cells = 0;
  std::uint32_t blocks = 0;
  Selectable visible;
  BlockFacts* facts = nullptr;    // [blocks]
  std::uint8_t* taken = nullptr;  // [blocks]
  float* scores = nullptr;        // [rows of a cell][blocks], reused by all cells
  float* values = nullptr;        // [cells + 1][blocks]; the last row is scratch
  std::atomic<bool> faulted{false};
};

// Scores the blocks of up to kMaxPartRuns tiles of one segment.
struct ScoreTask {
  std::uint32_t selection = 0;
  std::uint32_t segment = 0;
  std::uint32_t first_block = 0;  // index of the segment's first block among the item's blocks
  std::uint32_t first_tile = 0;
  std::uint32_t tiles = 0;
};

struct SelectionSize {
  std::uint32_t items = 0;
  std::uint32_t tasks = 0;
  std::uint64_t bytes = 0;  // facts, flags, scores and values of all items
};

SelectionSize MeasureSelections(const AttendBatch& batch);

// Fills arrays of the measured size. `selections` must be constructed, `memory` 64-byte aligned.
void WriteSelections(const AttendBatch& batch, std::span<ItemSelection> selections,
                     std::span<ScoreTask> tasks, std::byte* memory);

// Fills the facts of one selection. Sets `faulted` if a tile that must be read is outside its
// arena. Call before ChooseBlocks.
void FindBlockFacts(const AttendBatch& batch, ItemSelection& selection);

// The inputs of ChooseBlocks.
struct SelectionCall {
  const Operations* operations;
  const AttendBatch* batch;
  std::span<const Cell> cells;
  std::span<const Space> spaces;
  const float* queries;
  std::span<ItemSelection> selections;
  std::span<const ScoreTask> tasks;
};

// Fills `taken` of every selection. Sets `faulted` of those with a bad tile.
void ChooseBlocks(const SelectionCall& call, Executor& executor);

// Reports the taken entries in lane order.
void ReportSelection(const AttendItem& item, const ItemSelection& selection, SelectionSink& sink);

}  // namespace tessera::kernels
