// Attention over one part of a packed segment, on tensor cores. Work items, slices, softmax and
// partial results are those of attend_mma.cuh. Only the operands are built differently:
//
//   a stage   bitmaps, scales and values of 16 entries, copied as the tile stores them: 2.7 KiB
//             instead of 8 KiB at 25 % of 128 channels of bf16
//   scores    K operands, assembled in registers from bitmap and values (packed_index.h), times the
//             rotated query rows of rotate.cuh
//   output    V operands likewise, with two entries per register. The result is in V's rotated
//             space; the merge kernel rotates it back once per segment
//
// int8 and fp8 values become bf16 exactly. Their scales are not applied to the operands: K's scale
// multiplies the logits, V's the weights.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "kernels/cuda/common/fragment.h"
#include "kernels/cuda/common/gpu.cuh"
#include "kernels/cuda/common/packed_index.h"
#include "kernels/cuda/common/slices.cuh"
#include "kernels/cuda/common/work.cuh"
#include "kernels/cuda/select/selected_parts.cuh"

namespace tessera::kernels::cuda {

constexpr std::uint32_t LargestOf(std::initializer_list<std::uint32_t> numbers) {
  std::uint32_t largest = 0;
  for (const std::uint32_t number : numbers) largest = number > largest ? number : largest;
  return largest;
}

// Shape of one kernel and its shared memory:
//   per warp   stages x (16 x: K bits | K scales | K data | V bits | V scales | V data, then words)
//   then       maximum and sum per warp and column
//   then       per warp: 8 bytes for each of the 32 rows of a slice: where the row's slices of
//              channels begin
//   then       space that a walk may overrun
// A stage's size depends on the segment's strategy. A warp uses as many stages as fit, at most
// four.
template <ValueType kValuesValue, std::uint32_t kHeadDimValue, std::uint32_t kColumnTilesValue>
struct PackedShape {
  static constexpr ValueType kValues = kValuesValue;
  static constexpr ElementType kType = OperandType(kValues);
  static constexpr std::uint32_t kHeadDim = kHeadDimValue;
  static constexpr std::uint32_t kColumnTiles = kColumnTilesValue;
  static constexpr PackedTuning kTuning = PackedTuningFor(kHeadDim);
  static constexpr std::uint32_t kColumns = kColumnTiles * kTileColumns;
  static constexpr std::uint32_t kThreads = kTuning.warps * kWarp;
  static constexpr std::uint32_t kSteps = kHeadDim / 16;
  static constexpr std::uint32_t kValueBytes = static_cast<std::uint32_t>(ValueBytes(kValues));
  static constexpr std::uint32_t kStageEntries = kTuning.warps * kSliceEntries;
  static constexpr std::uint32_t kLargestRow =
      kHeadDim / 8 + static_cast<std::uint32_t>(ScaleBytes(kValues)) + kHeadDim * kValueBytes;
  static constexpr std::uint32_t kLargestStage = 2 * kSliceEntries * kLargestRow + kStageWordBytes;
  static constexpr std::uint32_t kOutputRow = kHeadDim + 4;
  static constexpr std::uint32_t kOutputBytes = kColumns * kOutputRow * 4;
  static constexpr std::uint32_t kWarpBytes =
      LargestOf({kTuning.stage_bytes, (kLargestStage + kChunkBytes - 1) / kChunkBytes* kChunkBytes,
                 kOutputBytes});
  static constexpr std::uint32_t kStateOffset = kTuning.warps * kWarpBytes;
  // How far a walk can overrun if a bitmap has too many bits, as in memory under a revoked reader.
  static constexpr std::uint32_t kOverrun = kHeadDim * kValueBytes + 64;
  static constexpr std::uint32_t kStartsOffset = kStateOffset + kTuning.warps * kColumns * 2 * 4;
  static constexpr std::uint32_t kStartsBytes = 2 * kSliceEntries * kRowSlices;  // per warp
  static constexpr std::uint32_t kSharedBytes =
      kStartsOffset + kTuning.warps * kStartsBytes + kOverrun;
  static_assert(kWarpBytes % kChunkBytes == 0 && kColumnTiles <= kTuning.column_tiles);
};

template <class Shape>
struct PackedState : MmaState<Shape> {
  float query_scale[Shape::kColumnTiles][2];  // scales of the accumulators' columns
};

// Offsets of the arrays of 16 rows in a stage. Each array takes a whole number of chunks, one per
// byte of its row, and is chunk-aligned in the tile too.
struct StageLayout {
  RowBytes key;
  RowBytes value;

  TESSERA_DEVICE explicit StageLayout(const TileLayout& tile)
      : key(tile.key_row), value(tile.value_row) {}
  TESSERA_DEVICE RowBytes row(bool of_value) const { return of_value ? value : key; }
  TESSERA_DEVICE std::uint32_t row_bytes(bool of_value) const {
    return row(of_value).bits + row(of_value).scale + row(of_value).data;
  }
  TESSERA_DEVICE std::uint32_t bits(bool of_value) const {
    return of_value ? kSliceEntries * row_bytes(false) : 0;
  }
  TESSERA_DEVICE std::uint32_t scales(bool of_value) const {
    return bits(of_value) + kSliceEntries * row(of_value).bits;
  }
  TESSERA_DEVICE std::uint32_t data(bool of_value) const {
    return scales(of_value) + kSliceEntries * row(of_value).scale;
  }
  TESSERA_DEVICE std::uint32_t words() const {
    return kSliceEntries * (row_bytes(false) + row_bytes(true));
  }
  TESSERA_DEVICE std::uint32_t bytes() const { return words() + kStageWordBytes; }
};

// The part's segment, as its warps read it.
struct PackedPart {
  const TileLayout& tile;
  StageLayout stage;
  std::uint32_t key_groups;
  std::uint32_t value_groups;
  TileWords words;

  TESSERA_DEVICE std::uint32_t groups(bool of_value) const {
    return of_value ? value_groups : key_groups;
  }
};

TESSERA_DEVICE PackedPart PackedPartOf(const StepStrategy& strategy) {
  return {
      .tile = strategy.layout,
      .stage = StageLayout(strategy.layout),
      .key_groups = static_cast<std::uint32_t>(strategy.shape.key.channels) / strategy.shape.group,
      .value_groups =
          static_cast<std::uint32_t>(strategy.shape.value.channels) / strategy.shape.group,
      .words = WordsOf(strategy)};
}

// Loads the B operands of all steps from the output of rotate.cuh; zeros after the last row.
template <class Shape>
TESSERA_DEVICE void LoadRotated(const AttendParams& params, const StepSequence& sequence,
                                std::uint32_t strategy, std::uint32_t first_column,
                                PackedState<Shape>& state) {
  const std::uint32_t columns = sequence.queries * params.group;
  const std::uint32_t limit = columns < params.max_columns ? columns : params.max_columns;
  const std::uint64_t first_slot = std::uint64_t{strategy} * params.max_columns;
  TESSERA_UNROLL
  for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
    const std::uint32_t tile_column = first_column + t * kTileColumns;
    const std::uint32_t column = tile_column + OperandBColumn(gpu::Lane());
    const std::uint16_t* row = params.rotated + (first_slot + column) * Shape::kHeadDim;
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < 2; ++i) {
      const std::uint32_t slice = KeySlice(gpu::Lane(), i);
      TESSERA_UNROLL
      for (std::uint32_t s = 0; s < Shape::kSteps; ++s) {
        const std::uint32_t channel = PairChannel(Shape::kHeadDim, slice, s);
        state.query[t][s][i] =
            column < limit ? *reinterpret_cast<const std::uint32_t*>(row + channel) : 0;
      }
      const std::uint32_t own = tile_column + AccumulatorColumn(gpu::Lane(), i);
      state.query_scale[t][i] = own < limit ? params.rotated_scales[first_slot + own] : 0;
    }
  }
}

// Starts copying 16 entries, from `entry` on. Rows that are not live are copied too, since they lie
// in the tile, but they are not used.
TESSERA_DEVICE void FetchPacked(const PackedPart& part, const std::byte* tile,
                                std::uint32_t first_row, std::byte* shared) {
  const StageLayout& stage = part.stage;
  const std::uint32_t keys = stage.row_bytes(false);  // chunks of K; the chunks of V follow
  const std::uint32_t chunks = keys + stage.row_bytes(true);
  for (std::uint32_t i = gpu::Lane(); i < chunks; i += kWarp) {
    const bool value = i >= keys;
    const RowBytes row = stage.row(value);
    std::uint32_t chunk = value ? i - keys : i;
    std::uint32_t row_bytes = row.bits;
    std::uint32_t array = value ? part.tile.value_bits : part.tile.key_bits;
    if (chunk >= row.bits + row.scale) {
      chunk -= row.bits + row.scale;
      row_bytes = row.data;
      array = value ? part.tile.value_data : part.tile.key_data;
    } else if (chunk >= row.bits) {
      chunk -= row.bits;
      row_bytes = row.scale;
      array = value ? part.tile.value_scales : part.tile.key_scales;
    }
    gpu::CopyChunk(shared + i * kChunkBytes,
                   tile + array + first_row * row_bytes + chunk * kChunkBytes, true);
  }
}

// Copies the rows of one array of a slice whose blocks are scattered, in the largest pieces that
// their alignment allows.
TESSERA_DEVICE void FetchArray(const SelectedRows& rows, std::uint32_t entry, std::uint32_t array,
                               std::uint32_t row_bytes, std::byte* shared) {
  const std::uint32_t block_bytes = rows.block() * row_bytes;
  const std::uint32_t piece = block_bytes % kChunkBytes == 0 ? kChunkBytes : 4;
  for (std::uint32_t at = gpu::Lane() * piece; at < kSliceEntries * row_bytes;
       at += kWarp * piece) {
    const std::uint32_t first = at / block_bytes * rows.block();
    const SelectedBlock& block = rows.BlockOf(entry + first);
    if (block.tile == 0) continue;
    const std::byte* source = reinterpret_cast<const std::byte*>(block.tile) + array +
                              block.row * row_bytes + at % block_bytes;
    if (piece == kChunkBytes) {
      gpu::CopyChunk(shared + at, source, true);
    } else {
      gpu::CopyWord(shared + at, source);
    }
  }
}

// The same for a selected part. Blocks without a tile leave the stage unchanged; their rows are not
// live.
TESSERA_DEVICE void FetchPacked(const PackedPart& part, const SelectedRows& rows,
                                std::uint32_t entry, std::byte* shared) {
  const StageLayout& stage = part.stage;
  if (rows.block() == kSliceEntries) {
    const SelectedBlock& block = rows.BlockOf(entry);
    if (block.tile == 0) return;
    FetchPacked(part, reinterpret_cast<const std::byte*>(block.tile), block.row, shared);
  } else {
    // One loop body for all six arrays: separate ones would cost registers that the products need.
    std::uint32_t place = 0;
    TESSERA_NO_UNROLL
    for (std::uint32_t i = 0; i < 6; ++i) {
      const bool value = i >= 3;
      const std::uint32_t which = value ? i - 3 : i;
      std::uint32_t array = value ? part.tile.value_bits : part.tile.key_bits;
      std::uint32_t row_bytes = stage.row(value).bits;
      if (which == 1) {
        array = value ? part.tile.value_scales : part.tile.key_scales;
        row_bytes = stage.row(value).scale;
      } else if (which == 2) {
        array = value ? part.tile.value_data : part.tile.key_data;
        row_bytes = stage.row(value).data;
      }
      FetchArray(rows, entry, array, row_bytes, shared + place);
      place += kSliceEntries * row_bytes;
    }
  }
  FetchWords(rows, entry, part.words, shared + stage.words());
}

TESSERA_DEVICE bool IsLive(EntryRange live, std::uint32_t entry) { return live.Contains(entry); }
TESSERA_DEVICE bool IsLive(const SelectedRows& rows, std::uint32_t entry) {
  return rows.Live(entry);
}

// Counts where the slices of each row begin. Lane r handles row r: 16 rows of K, then 16 of V.
// Later 8 lanes walk each row. Warp-collective.
template <class Shape, std::uint32_t kGroup>
TESSERA_DEVICE void CountStarts(const PackedPart& part, const std::byte* shared,
                                std::byte* starts) {
  const bool value = gpu::Lane() >= kSliceEntries;
  const std::uint32_t row_bits = part.stage.row(value).bits;
  if (row_bits != 0) {
    const auto* bitmaps = reinterpret_cast<const std::uint32_t*>(shared + part.stage.bits(value));
    reinterpret_cast<std::uint64_t*>(starts)[gpu::Lane()] = SliceStarts<Shape::kHeadDim, kGroup>(
        bitmaps, gpu::Lane() % kSliceEntries, row_bits, part.groups(value));
  }
  gpu::SyncWarp();
}

// Begins the walk of one row's slice. Rows that are not live are walked as if they kept nothing.
template <class Shape, std::uint32_t kGroup>
TESSERA_DEVICE PairWalk<kGroup, Shape::kValueBytes> BeginWalk(const PackedPart& part, bool value,
                                                              std::uint32_t row, bool live,
                                                              std::uint32_t slice,
                                                              const std::byte* shared,
                                                              const std::byte* starts) {
  const RowBytes bytes = part.stage.row(value);
  const auto* bitmaps = reinterpret_cast<const std::uint32_t*>(shared + part.stage.bits(value));
  const std::uint32_t place = ((value ? kSliceEntries : 0) + row) * kRowSlices + slice;
  RowSlice found = bytes.bits == 0 ? WholeSlice<Shape::kHeadDim, kGroup>(part.groups(value), slice)
                                   : FindSlice<Shape::kHeadDim, kGroup>(
                                         bitmaps, row, bytes.bits, part.groups(value), slice,
                                         static_cast<std::uint32_t>(starts[place]));
  if (!live) found.bits = 0;
  return {found, shared + part.stage.data(value) + row * bytes.data};
}

TESSERA_DEVICE float ScaleOfRow(const PackedPart& part, bool value, std::uint32_t row,
                                const std::byte* shared) {
  const auto* scales = reinterpret_cast<const std::uint16_t*>(shared + part.stage.scales(value));
  return std::bit_cast<float>(static_cast<std::uint32_t>(scales[row]) << 16);
}

// scores[t]: 16 entries x 8 columns.
template <class Shape, std::uint32_t kGroup>
TESSERA_DEVICE void ScorePacked(const PackedPart& part, const std::byte* shared,
                                const std::byte* starts, const PackedState<Shape>& state,
                                float (&scores)[Shape::kColumnTiles][4]) {
  PairWalk<kGroup, Shape::kValueBytes> walks[4];
  float scale[2] = {1, 1};
  TESSERA_UNROLL
  for (std::uint32_t i = 0; i < 4; ++i) {
    walks[i] = BeginWalk<Shape, kGroup>(part, false, AccumulatorRow(gpu::Lane(), i % 2 * 2), true,
                                        KeySlice(gpu::Lane(), i / 2), shared, starts);
  }
  TESSERA_UNROLL
  for (std::uint32_t i = 0; i < 2 && IsScaled(Shape::kValues); ++i) {
    scale[i] = ScaleOfRow(part, false, AccumulatorRow(gpu::Lane(), i * 2), shared);
  }
  TESSERA_UNROLL
  for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < 4; ++i) scores[t][i] = 0;
  }
  TESSERA_UNROLL
  for (std::uint32_t s = 0; s < Shape::kSteps; ++s) {
    std::uint32_t key[4];
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < 4; ++i) key[i] = ToOperand<Shape::kValues>(walks[i].Next(s));
    TESSERA_UNROLL
    for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
      gpu::Mma<Shape::kType>(scores[t], key, state.query[t][s]);
    }
  }
  TESSERA_UNROLL
  for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < 4; ++i) {
      scores[t][i] = scores[t][i] * scale[i / 2] * state.query_scale[t][i % 2];
    }
  }
}

// output += V x weights. `rows`: the part's live entries, or its SelectedRows.
template <class Shape, std::uint32_t kGroup, class Rows>
TESSERA_DEVICE void AddPacked(const PackedPart& part, const Rows& rows, std::uint32_t entry,
                              const std::byte* shared, const std::byte* starts,
                              const std::uint32_t (&weights)[Shape::kColumnTiles][2],
                              PackedState<Shape>& state) {
  PairWalk<kGroup, Shape::kValueBytes> walks[4];
  TESSERA_UNROLL
  for (std::uint32_t i = 0; i < 4; ++i) {
    const std::uint32_t row = ValueEntry(gpu::Lane(), i);
    walks[i] = BeginWalk<Shape, kGroup>(part, true, row, IsLive(rows, entry + row),
                                        ValueSlice(gpu::Lane()), shared, starts);
  }
  TESSERA_UNROLL
  for (std::uint32_t s = 0; s < Shape::kSteps; ++s) {
    std::uint32_t words[4];
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < 4; ++i) words[i] = ToOperand<Shape::kValues>(walks[i].Next(s));
    const std::uint32_t value[4] = {LowHalves(words[0], words[1]), HighHalves(words[0], words[1]),
                                    LowHalves(words[2], words[3]), HighHalves(words[2], words[3])};
    TESSERA_UNROLL
    for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
      gpu::Mma<Shape::kType>(state.output[t][s], value, weights[t]);
    }
  }
}

template <class Shape, std::uint32_t kGroup, class Rows>
TESSERA_DEVICE void AttendPackedSlice(const AttendParams& params, const PackedPart& part,
                                      const Rows& rows, std::uint32_t entry,
                                      const std::byte* shared, std::byte* starts,
                                      PackedState<Shape>& state) {
  CountStarts<Shape, kGroup>(part, shared, starts);
  float scores[Shape::kColumnTiles][4];
  ScorePacked<Shape, kGroup>(part, shared, starts, state, scores);
  const RowFacts facts = ReadFacts(rows, entry, part.words, shared + part.stage.words());
  std::uint32_t weights[Shape::kColumnTiles][2];
  TESSERA_UNROLL
  for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
    MaskRows<Shape>(params, facts, t, state, scores[t]);
    AddLogits<Shape::kType, Shape>(t, state, scores[t]);
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < 4 && IsScaled(Shape::kValues); ++i) {
      // The scale of a row that is not live may be anything.
      const float scale = ScaleOfRow(part, true, AccumulatorRow(gpu::Lane(), i), shared);
      scores[t][i] *= facts.live[i / 2] ? scale : 0;
    }
    TransposeWeights<Shape::kType>(scores[t], weights[t]);
  }
  AddPacked<Shape, kGroup>(part, rows, entry, shared, starts, weights, state);
}

// Walks this warp's slices of a part. fetch(entry, stage) starts the copies of a slice.
template <class Shape, std::uint32_t kGroup, class Rows, class Fetch>
TESSERA_DEVICE void AttendPackedSlices(const AttendParams& params, const PackedPart& part,
                                       const Rows& rows, EntryRange range, Fetch fetch,
                                       std::byte* shared, std::byte* starts,
                                       PackedState<Shape>& state) {
  constexpr std::uint32_t kMost = Shape::kTuning.most_stages - 1;
  const std::uint32_t stage_bytes = part.stage.bytes();
  std::uint32_t ahead = 0;
  while (ahead < kMost && (ahead + 2) * stage_bytes <= Shape::kWarpBytes) ++ahead;
  const auto attend = [&](std::uint32_t entry, const std::byte* stage) {
    AttendPackedSlice<Shape, kGroup>(params, part, rows, entry, stage, starts, state);
  };
  WalkSlices<kMost, Shape::kStageEntries>(
      range, {.shared = shared, .stage_bytes = stage_bytes, .ahead = ahead}, fetch, attend);
}

// Handles a part from clearing the state to storing the result. Block-collective.
template <class Shape, class Rows, class Fetch>
TESSERA_DEVICE void AttendPackedPart(const AttendParams& params, const StepSequence& sequence,
                                     const Work& work, const StepStrategy& strategy,
                                     const PackedPart& part, const Rows& rows, EntryRange range,
                                     Fetch fetch, std::byte* shared) {
  const std::uint32_t first_column = gpu::BlockY() * Shape::kColumns;
  PackedState<Shape> state;
  ClearState<Shape>(params, sequence, work, first_column, state);
  LoadRotated<Shape>(params, sequence, work.part.strategy, first_column, state);
  std::byte* const own = shared + gpu::Warp() * Shape::kWarpBytes;
  std::byte* const starts = shared + Shape::kStartsOffset + gpu::Warp() * Shape::kStartsBytes;
  if (strategy.shape.group == 2) {
    AttendPackedSlices<Shape, 2>(params, part, rows, range, fetch, own, starts, state);
  } else if (strategy.shape.group == 4) {
    AttendPackedSlices<Shape, 4>(params, part, rows, range, fetch, own, starts, state);
  } else {
    AttendPackedSlices<Shape, 1>(params, part, rows, range, fetch, own, starts, state);
  }
  StoreWarpResult<Shape::kType, Shape>(state, shared, [](std::uint32_t s, std::uint32_t i) {
    return PairChannel(Shape::kHeadDim, ValueSlice(gpu::Lane()), s) + i / 2;
  });
  gpu::SyncBlock();
  StoreResult<Shape>(params, sequence, work, first_column, shared);
  gpu::SyncBlock();
}

// Kernel body. blockIdx.y selects the columns.
template <ValueType kValues, std::uint32_t kHeadDim, std::uint32_t kColumnTiles>
TESSERA_DEVICE void AttendPacked(const AttendParams& params) {
  using Shape = PackedShape<kValues, kHeadDim, kColumnTiles>;
  const StepReader step(params.step);
  std::byte* shared = gpu::SharedMemory();
  const std::uint32_t works = CountWorks(params, step);
  for (std::uint32_t index = gpu::BlockX(); index < works; index += gpu::GridX()) {
    const Work work = LocateWork(params, step, index);
    if (work.part.kind != KindOf({.format = PackedFormat(kValues)})) continue;
    const StepSequence& sequence = step.sequence(work.lane / step.layer(params.layer).kv_heads);
    const StepStrategy& strategy = step.strategy(params.layer, work.part.strategy);
    PartTiles tiles;
    const bool found = tiles.Find(step.arena(), work.part, TileBytesOf(params, step, work.part, 0));
    ReportWork(params, sequence, work, found);
    const PackedPart part = PackedPartOf(strategy);
    // Warps may disagree on `found`; none may skip the barriers at the end of the part.
    const EntryRange live = found ? work.part.entries : EntryRange{};
    const auto fetch = [&](std::uint32_t entry, std::byte* stage) {
      const std::byte* tile = tiles.Address(entry / kTileEntries);
      FetchPacked(part, tile, entry % kTileEntries, stage);
      FetchWords(tile, entry % kTileEntries, part.words, stage + part.stage.words());
    };
    AttendPackedPart<Shape>(params, sequence, work, strategy, part, live, live, fetch, shared);
  }
}

// The same kernel for parts of selected blocks. Runs after the selection.
template <ValueType kValues, std::uint32_t kHeadDim, std::uint32_t kColumnTiles>
TESSERA_DEVICE void AttendPackedSelected(const AttendParams& params) {
  using Shape = PackedShape<kValues, kHeadDim, kColumnTiles>;
  const StepReader step(params.step);
  std::byte* shared = gpu::SharedMemory();
  const std::uint32_t slots = CountSlots(params, step);
  for (std::uint32_t index = gpu::BlockX(); index < slots; index += gpu::GridX()) {
    const SelectedWork selected = LocateSelected(params, step, index);
    const Work& work = selected.work;
    if (selected.count == 0 || work.part.kind != KindOf({.format = PackedFormat(kValues)})) {
      continue;
    }
    const StepSequence& sequence = step.sequence(work.lane / step.layer(params.layer).kv_heads);
    const StepStrategy& strategy = step.strategy(params.layer, work.part.strategy);
    SelectedRows rows(selected, shared + SelectedShape<Shape>::kTableOffset);
    const bool found = rows.Find(step.arena(), selected, TileBytesOf(params, step, work.part, 0));
    ReportSelected(params, sequence, work, found);
    const PackedPart part = PackedPartOf(strategy);
    const auto fetch = [&](std::uint32_t entry, std::byte* stage) {
      FetchPacked(part, rows, entry, stage);
    };
    AttendPackedPart<Shape>(params, sequence, work, strategy, part, rows, rows.range(), fetch,
                            shared);
  }
}

}  // namespace tessera::kernels::cuda
