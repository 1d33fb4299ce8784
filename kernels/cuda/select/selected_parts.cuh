// Parts of selected blocks: from a slot of the layer to the rows that a block of threads reads.
//
// An entry of such a part is a row of one of its taken blocks, counted through. Where each block's
// tile is, is found once per part, by all threads together, and lies in shared memory.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/gpu.cuh"
#include "kernels/cuda/common/selection_index.h"
#include "kernels/cuda/common/slices.cuh"
#include "kernels/cuda/common/work.cuh"

namespace tessera::kernels::cuda {

struct TakenBlock {
  std::uint64_t tile;   // its address; 0: there is none
  std::uint32_t entry;  // of the segment, the block's first
  std::uint8_t row;     // likewise, of the tile
  std::uint8_t begin;   // rows of the block that are live: some query sees them
  std::uint8_t end;
  std::uint8_t reserved;
};
static_assert(sizeof(TakenBlock) == 16);
inline constexpr std::uint32_t kTakenBytes = kMostTakenBlocks * sizeof(TakenBlock);

// The shape of the kernel that walks selected parts: that of whole ones, and the table behind it.
template <class Whole>
struct SelectedShape {
  static constexpr std::uint32_t kHeadDim = Whole::kHeadDim;
  static constexpr std::uint32_t kThreads = Whole::kThreads;
  static constexpr std::uint32_t kColumns = Whole::kColumns;
  static constexpr std::uint32_t kTableOffset = Whole::kSharedBytes;
  static constexpr std::uint32_t kSharedBytes = kTableOffset + kTakenBytes;
  static_assert(kTableOffset % alignof(TakenBlock) == 0);
};

struct SelectedWork {
  Work work;  // `part.entries`: those of the segment that some query sees
  std::uint32_t block = 0;
  std::uint32_t count = 0;   // blocks; 0: the slot has no part
  std::uint32_t blocks = 0;  // of the segment
  const std::uint32_t* taken = nullptr;
};

// The slots of the layer; 0, and a fault, where the launch cannot serve the image.
TESSERA_DEVICE std::uint32_t CountSlots(const AttendParams& params, const StepReader& step) {
  if (!ServesOrReports(params, step)) return 0;
  const std::uint32_t selections = step.layer(params.layer).selections;
  return selections == 0 ? 0 : step.slots(params.layer)[selections];
}

// Called by whole warps.
TESSERA_DEVICE SelectedWork LocateSelected(const AttendParams& params, const StepReader& step,
                                           std::uint32_t index) {
  const std::uint32_t* slots = step.slots(params.layer);
  const std::uint32_t place = FindLane(slots, step.layer(params.layer).selections, index);
  const StepSelection& selection = step.selection(params.layer, place);
  const StepChoice* choices = step.choices(params.layer) + selection.first_choice;
  const StepSegment* segments = step.segments(step.lane(params.layer, selection.lane));
  const auto strategy_of = [&](std::uint32_t choice) -> const StepStrategy& {
    return step.strategy(params.layer, segments[choices[choice].segment].strategy);
  };
  const TakenSlice slice =
      SliceOfPart(params.ranges + FirstRangeOf(selection, place), selection, index - slots[place],
                  [&](std::uint32_t choice) { return strategy_of(choice).shape.block; });
  SelectedWork located;
  located.count = slice.count;
  if (slice.count == 0) return located;
  const StepSegment& segment = segments[choices[slice.choice].segment];
  const StepStrategy& strategy = strategy_of(slice.choice);
  located.block = strategy.shape.block;
  located.blocks = choices[slice.choice].blocks;
  located.taken = params.taken + selection.first_block + slice.first;
  Work& work = located.work;
  work.index = params.max_works + index;
  work.lane = selection.lane;
  const std::uint32_t kv_heads = step.layer(params.layer).kv_heads;
  work.kv_head = selection.lane % kv_heads;
  const StepSequence& sequence = step.sequence(selection.lane / kv_heads);
  const Positions visible = VisibleFromAll(sequence.first_query_position, sequence.queries,
                                           {.causal = params.causal != 0, .window = params.window});
  work.part.base_position = segment.first_position;
  work.part.tile_table = segment.tile_table;
  work.part.entries =
      VisibleEntries(segment.first_position, {.begin = 0, .end = segment.entries}, visible);
  ApplyStrategy(strategy, segment, segment.entries, visible, work.part);
  work.part.kind = SelectedKindOf(strategy.shape);
  return located;
}

// Reports what a thread finds wrong with a part. `found`: the tiles that it looked for are in the
// pool.
TESSERA_DEVICE void ReportSelected(const AttendParams& params, const StepSequence& sequence,
                                   const Work& work, bool found) {
  if (!found) Report(params, FaultKind::kBadTile, work);
  if (sequence.queries * params.group > params.max_columns && gpu::Thread() == 0) {
    Report(params, FaultKind::kBadStep, work);
  }
}

// The rows of a part, as all warps of a block read them.
class TakenRows {
 public:
  TESSERA_DEVICE TakenRows(const SelectedWork& selected, std::byte* table)
      : blocks_(reinterpret_cast<TakenBlock*>(table)),
        shift_(selected.block == 16 ? 4 : (selected.block == 8 ? 3 : 2)),
        end_(selected.count << shift_) {}

  // Fills the table; nobody may be reading an older one. False for threads that saw a tile outside
  // the pool, or `tile_bytes` 0. Every word is read once; what was checked is what is used. The
  // whole block.
  TESSERA_DEVICE bool Find(const DeviceArena& arena, const SelectedWork& selected,
                           std::uint32_t tile_bytes) {
    bool found = true;
    for (std::uint32_t i = gpu::Thread(); i < kMostTakenBlocks; i += gpu::Threads()) {
      blocks_[i] = {};
      if (i >= selected.count) continue;
      blocks_[i] = Resolve(arena, selected, selected.taken[i], tile_bytes);
      found = found && blocks_[i].tile != 0;
    }
    gpu::SyncBlock();
    return found;
  }

  TESSERA_DEVICE EntryRange range() const { return {.begin = 0, .end = end_}; }
  TESSERA_DEVICE std::uint32_t block() const { return 1u << shift_; }
  TESSERA_DEVICE const TakenBlock& BlockOf(std::uint32_t entry) const {
    return blocks_[entry >> shift_];
  }
  // The entry of the segment.
  TESSERA_DEVICE std::uint32_t EntryOf(std::uint32_t entry) const {
    return BlockOf(entry).entry + InBlock(entry);
  }
  TESSERA_DEVICE bool Live(std::uint32_t entry) const {
    return InBlock(entry) >= BlockOf(entry).begin && InBlock(entry) < BlockOf(entry).end;
  }
  TESSERA_DEVICE const std::byte* TileOf(std::uint32_t entry) const {
    return reinterpret_cast<const std::byte*>(BlockOf(entry).tile);
  }
  TESSERA_DEVICE std::uint32_t RowOf(std::uint32_t entry) const {
    return BlockOf(entry).row + InBlock(entry);
  }

 private:
  TESSERA_DEVICE std::uint32_t InBlock(std::uint32_t entry) const {
    return entry & ((1u << shift_) - 1);
  }
  // All zeros where the block is none of the segment's or its tile is not in the pool.
  TESSERA_DEVICE static TakenBlock Resolve(const DeviceArena& arena, const SelectedWork& selected,
                                           std::uint32_t number, std::uint32_t tile_bytes) {
    if (number >= selected.blocks || tile_bytes == 0) return {};
    const PartRef& part = selected.work.part;
    const std::uint32_t entry = number * selected.block;
    const std::uint64_t word =
        ResolveObject(arena, part.tile_table + std::uint64_t{entry / kTileEntries} * 8, 8, 8);
    if (word == 0) return {};
    const std::uint64_t offset = gpu::LoadOnce(reinterpret_cast<const std::uint64_t*>(word));
    const std::uint64_t tile = ResolveObject(arena, offset, tile_bytes, kTileAlignment);
    if (tile == 0) return {};
    const EntryRange live = LiveOfBlock(part.entries, entry, selected.block);
    return {.tile = tile,
            .entry = entry,
            .row = static_cast<std::uint8_t>(entry % kTileEntries),
            .begin = static_cast<std::uint8_t>(live.begin),
            .end = static_cast<std::uint8_t>(live.end),
            .reserved = 0};
  }

  TakenBlock* blocks_;
  std::uint32_t shift_;
  std::uint32_t end_;
};

// As FetchWords, rows apart; those of rows without a tile stay what they are.
TESSERA_DEVICE void FetchWords(const TakenRows& rows, std::uint32_t entry, const TileWords& words,
                               std::byte* shared) {
  const bool of_positions = gpu::Lane() >= kSliceEntries;
  if (!(of_positions ? words.positions : words.weights)) return;
  const std::uint32_t own = entry + gpu::Lane() % kSliceEntries;
  const std::byte* tile = rows.TileOf(own);
  if (tile == nullptr) return;
  gpu::CopyWord(
      shared + gpu::Lane() * 4,
      tile + (of_positions ? words.positions_at : words.weights_at) + rows.RowOf(own) * 4);
}

// As ReadFacts of a whole part: places are entries of the segment.
TESSERA_DEVICE RowFacts ReadFacts(const TakenRows& rows, std::uint32_t entry,
                                  const TileWords& words, const std::byte* shared) {
  RowFacts facts;
  TESSERA_UNROLL
  for (std::uint32_t i = 0; i < 2; ++i) {
    const std::uint32_t row = AccumulatorRow(gpu::Lane(), i * 2);
    const auto* word = reinterpret_cast<const std::uint32_t*>(shared) + row;
    facts.live[i] = rows.Live(entry + row);
    facts.place[i] = words.positions ? word[kSliceEntries] : rows.EntryOf(entry + row);
    facts.bias[i] = words.weights ? gpu::Log2(std::bit_cast<float>(*word)) : 0;
  }
  return facts;
}

}  // namespace tessera::kernels::cuda
