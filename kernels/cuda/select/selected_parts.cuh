// Parts of selected blocks: from a slot of the layer to the rows that a block of threads reads.
//
// The entries of such a part are the rows of its selected blocks, numbered consecutively. All
// threads together locate each block's tile once per part and keep the addresses in shared memory.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/gpu.cuh"
#include "kernels/cuda/common/selection_index.h"
#include "kernels/cuda/common/slices.cuh"
#include "kernels/cuda/common/work.cuh"

namespace tessera::kernels::cuda {

struct SelectedBlock {
  std::uint64_t tile;   // address; 0: none
  std::uint32_t entry;  // index in the segment of the block's first entry
  std::uint8_t row;     // row in the tile of the block's first entry
  std::uint8_t begin;   // rows [begin, end) of the block that some query sees
  std::uint8_t end;
  std::uint8_t reserved;
};
static_assert(sizeof(SelectedBlock) == 16);
inline constexpr std::uint32_t kSelectedTableBytes = kMaxSelectedBlocks * sizeof(SelectedBlock);

// Shape of the kernel that walks selected parts: the shape for whole parts, followed by the block
// table.
template <class Whole>
struct SelectedShape {
  static constexpr std::uint32_t kHeadDim = Whole::kHeadDim;
  static constexpr std::uint32_t kThreads = Whole::kThreads;
  static constexpr std::uint32_t kColumns = Whole::kColumns;
  static constexpr std::uint32_t kTableOffset = Whole::kSharedBytes;
  static constexpr std::uint32_t kSharedBytes = kTableOffset + kSelectedTableBytes;
  static_assert(kTableOffset % alignof(SelectedBlock) == 0);
};

struct SelectedWork {
  Work work;  // `part.entries`: entries of the segment that some query sees
  std::uint32_t block = 0;
  std::uint32_t count = 0;   // number of blocks; 0: the slot has no part
  std::uint32_t blocks = 0;  // blocks of the segment
  const std::uint32_t* taken = nullptr;
};

// Number of slots of the layer. Reports a fault and returns 0 if the launch cannot handle the
// image.
TESSERA_DEVICE std::uint32_t CountSlots(const AttendParams& params, const StepReader& step) {
  if (!ServesOrReports(params, step)) return 0;
  const std::uint32_t selections = step.layer(params.layer).selections;
  return selections == 0 ? 0 : step.slots(params.layer)[selections];
}

// Warp-collective.
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
  const SelectedSlice slice =
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

// Reports the problems that a thread found in a part. `found`: the tiles that it looked up are in
// the pool.
TESSERA_DEVICE void ReportSelected(const AttendParams& params, const StepSequence& sequence,
                                   const Work& work, bool found) {
  if (!found) Report(params, FaultKind::kBadTile, work);
  if (sequence.queries * params.group > params.max_columns && gpu::Thread() == 0) {
    Report(params, FaultKind::kBadStep, work);
  }
}

// The rows of a part, as all warps of a block read them.
class SelectedRows {
 public:
  TESSERA_DEVICE SelectedRows(const SelectedWork& selected, std::byte* table)
      : blocks_(reinterpret_cast<SelectedBlock*>(table)),
        shift_(selected.block == 16 ? 4 : (selected.block == 8 ? 3 : 2)),
        end_(selected.count << shift_) {}

  // Fills the table. Returns false in threads that found a tile outside the pool, and if
  // `tile_bytes` is 0. Every table word is read once, and the value that was checked is the value
  // that is used. Block-collective; no thread may still be reading an older table.
  TESSERA_DEVICE bool Find(const DeviceArena& arena, const SelectedWork& selected,
                           std::uint32_t tile_bytes) {
    bool found = true;
    for (std::uint32_t i = gpu::Thread(); i < kMaxSelectedBlocks; i += gpu::Threads()) {
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
  TESSERA_DEVICE const SelectedBlock& BlockOf(std::uint32_t entry) const {
    return blocks_[entry >> shift_];
  }
  // Converts an entry of the part to an entry of the segment.
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
  // Returns zeros if the block is not in the segment or its tile is not in the pool.
  TESSERA_DEVICE static SelectedBlock Resolve(const DeviceArena& arena,
                                              const SelectedWork& selected, std::uint32_t number,
                                              std::uint32_t tile_bytes) {
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

  SelectedBlock* blocks_;
  std::uint32_t shift_;
  std::uint32_t end_;
};

// Like FetchWords for whole parts, for scattered rows. Rows without a tile keep the old contents.
TESSERA_DEVICE void FetchWords(const SelectedRows& rows, std::uint32_t entry,
                               const TileWords& words, std::byte* shared) {
  const bool of_positions = gpu::Lane() >= kSliceEntries;
  if (!(of_positions ? words.positions : words.weights)) return;
  const std::uint32_t own = entry + gpu::Lane() % kSliceEntries;
  const std::byte* tile = rows.TileOf(own);
  if (tile == nullptr) return;
  gpu::CopyWord(
      shared + gpu::Lane() * 4,
      tile + (of_positions ? words.positions_at : words.weights_at) + rows.RowOf(own) * 4);
}

// Like ReadFacts for whole parts. Places are entries of the segment.
TESSERA_DEVICE RowFacts ReadFacts(const SelectedRows& rows, std::uint32_t entry,
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
