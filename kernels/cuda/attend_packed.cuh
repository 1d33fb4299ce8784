// Attention over one part of a packed segment, on tensor cores. Work items, slices, softmax and
// partial results are those of attend_mma.cuh; what differs is how operands come to be:
//
//   a stage        the bitmaps, scales and values of 16 entries as they lie in the tile, a quarter
//                  of a dense slice or less
//   scores         K operands put together in registers from bitmap and values (packed_index.h),
//                  times the rotated query rows of rotate.cuh
//   output         V operands likewise, two entries crossed into each register; in V's space, which
//                  the merge leaves once per segment
//
// int8 and fp8 values become bf16 exactly. Their scales are left out of the operands: K's goes on
// the logits, V's on the weights.
#pragma once

#include <cstdint>

#include "kernels/cuda/fragment.h"
#include "kernels/cuda/gpu.cuh"
#include "kernels/cuda/packed_index.h"
#include "kernels/cuda/slices.cuh"
#include "kernels/cuda/work.cuh"

namespace tessera::kernels::cuda {

// The shape of one kernel and its shared memory:
//   per warp   stages x (16 x: K bits | K scales | K data | V bits | V scales | V data, then words)
//   then       max and sum of each warp and column, then space that a walk may run into
// How much a stage takes is known only with a segment's strategy; a warp has room for two of the
// largest, and uses four where they fit.
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
  static constexpr std::uint32_t kWarpBytes = kTuning.least_stages * kLargestStage > kOutputBytes
                                                  ? kTuning.least_stages* kLargestStage
                                                  : kOutputBytes;
  static constexpr std::uint32_t kStateOffset = kTuning.warps * kWarpBytes;
  // A bitmap with too many bits, as memory under a revoked reader may hold, leads this far at most.
  static constexpr std::uint32_t kOverrun = kHeadDim * kValueBytes + 64;
  static constexpr std::uint32_t kSharedBytes =
      kStateOffset + kTuning.warps * kColumns * 2 * 4 + kOverrun;
  static_assert(kWarpBytes % kChunkBytes == 0 && kColumnTiles <= kTuning.column_tiles);
};

template <class Shape>
struct PackedState : MmaState<Shape> {
  float query_scale[Shape::kColumnTiles][2];  // of the accumulators' columns
};

// Where the arrays of 16 rows begin in a stage. Each takes a whole number of chunks, as many as its
// row has bytes, and begins at one in the tile too.
struct StageLayout {
  std::uint32_t row_bits;
  std::uint32_t row_scale;
  std::uint32_t row_data;

  TESSERA_DEVICE explicit StageLayout(const TileLayout& tile)
      : row_bits(tile.row_bits), row_scale(tile.row_scale), row_data(tile.row_data) {}
  TESSERA_DEVICE std::uint32_t row_bytes() const { return row_bits + row_scale + row_data; }
  TESSERA_DEVICE std::uint32_t bits(bool value) const {
    return value ? kSliceEntries * row_bytes() : 0;
  }
  TESSERA_DEVICE std::uint32_t scales(bool value) const {
    return bits(value) + kSliceEntries * row_bits;
  }
  TESSERA_DEVICE std::uint32_t data(bool value) const {
    return scales(value) + kSliceEntries * row_scale;
  }
  TESSERA_DEVICE std::uint32_t words() const { return 2 * kSliceEntries * row_bytes(); }
  TESSERA_DEVICE std::uint32_t bytes() const { return words() + kStageWordBytes; }
};

// The part's segment, as its warps read it.
struct PackedPart {
  const TileLayout& tile;
  StageLayout stage;
  std::uint32_t groups;  // bits of a row
  EntryRange live;
  TileWords words;
};

// The B operands of all steps, from what rotate.cuh left; zeros beyond the last row.
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

// Starts copying 16 entries, from `entry` on. Rows that are not live come along: they lie in the
// tile, and nothing is made of them.
TESSERA_DEVICE void FetchPacked(const PackedPart& part, const PartTiles& tiles, std::uint32_t entry,
                                std::byte* shared) {
  const std::byte* tile = tiles.Address(entry / kTileEntries);
  const std::uint32_t first_row = entry % kTileEntries;
  const StageLayout& stage = part.stage;
  const std::uint32_t side = stage.row_bytes();  // chunks of K, and of V
  for (std::uint32_t i = gpu::Lane(); i < 2 * side; i += kWarp) {
    const bool value = i >= side;
    std::uint32_t chunk = value ? i - side : i;
    std::uint32_t row_bytes = stage.row_bits;
    std::uint32_t array = value ? part.tile.value_bits : part.tile.key_bits;
    if (chunk >= stage.row_bits + stage.row_scale) {
      chunk -= stage.row_bits + stage.row_scale;
      row_bytes = stage.row_data;
      array = value ? part.tile.value_data : part.tile.key_data;
    } else if (chunk >= stage.row_bits) {
      chunk -= stage.row_bits;
      row_bytes = stage.row_scale;
      array = value ? part.tile.value_scales : part.tile.key_scales;
    }
    gpu::CopyChunk(shared + i * kChunkBytes,
                   tile + array + first_row * row_bytes + chunk * kChunkBytes, true);
  }
  FetchWords(tile, first_row, part.words, shared + stage.words());
}

// The walk of one row's slice. A row that is not live is walked as if it kept nothing.
template <class Shape, std::uint32_t kGroup>
TESSERA_DEVICE PairWalk<kGroup, Shape::kValueBytes> BeginWalk(const PackedPart& part, bool value,
                                                              std::uint32_t row, bool live,
                                                              std::uint32_t slice,
                                                              const std::byte* shared) {
  const auto* bitmaps = reinterpret_cast<const std::uint32_t*>(shared + part.stage.bits(value));
  RowSlice found =
      FindSlice<Shape::kHeadDim, kGroup>(bitmaps, row, part.stage.row_bits, part.groups, slice);
  if (!live) found.bits = 0;
  return {found, shared + part.stage.data(value) + row * part.stage.row_data};
}

TESSERA_DEVICE float ScaleOfRow(const PackedPart& part, bool value, std::uint32_t row,
                                const std::byte* shared) {
  const auto* scales = reinterpret_cast<const std::uint16_t*>(shared + part.stage.scales(value));
  return std::bit_cast<float>(static_cast<std::uint32_t>(scales[row]) << 16);
}

// scores[t]: 16 entries x 8 columns.
template <class Shape, std::uint32_t kGroup>
TESSERA_DEVICE void ScorePacked(const PackedPart& part, const std::byte* shared,
                                const PackedState<Shape>& state,
                                float (&scores)[Shape::kColumnTiles][4]) {
  PairWalk<kGroup, Shape::kValueBytes> walks[4];
  float scale[2] = {1, 1};
  TESSERA_UNROLL
  for (std::uint32_t i = 0; i < 4; ++i) {
    walks[i] = BeginWalk<Shape, kGroup>(part, false, AccumulatorRow(gpu::Lane(), i % 2 * 2), true,
                                        KeySlice(gpu::Lane(), i / 2), shared);
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

// output += V x weights.
template <class Shape, std::uint32_t kGroup>
TESSERA_DEVICE void AddPacked(const PackedPart& part, std::uint32_t entry, const std::byte* shared,
                              const std::uint32_t (&weights)[Shape::kColumnTiles][2],
                              PackedState<Shape>& state) {
  PairWalk<kGroup, Shape::kValueBytes> walks[4];
  TESSERA_UNROLL
  for (std::uint32_t i = 0; i < 4; ++i) {
    const std::uint32_t row = ValueEntry(gpu::Lane(), i);
    walks[i] = BeginWalk<Shape, kGroup>(part, true, row, part.live.Contains(entry + row),
                                        ValueSlice(gpu::Lane()), shared);
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

template <class Shape, std::uint32_t kGroup>
TESSERA_DEVICE void AttendPackedSlice(const AttendParams& params, const PackedPart& part,
                                      std::uint32_t entry, const std::byte* shared,
                                      PackedState<Shape>& state) {
  float scores[Shape::kColumnTiles][4];
  ScorePacked<Shape, kGroup>(part, shared, state, scores);
  const RowFacts facts = ReadFacts(part.live, entry, part.words, shared + part.stage.words());
  std::uint32_t weights[Shape::kColumnTiles][2];
  TESSERA_UNROLL
  for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
    JudgeRows<Shape>(params, facts, t, state, scores[t]);
    AddLogits<Shape::kType, Shape>(t, state, scores[t]);
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < 4 && IsScaled(Shape::kValues); ++i) {
      // The scale of a dead row may be anything.
      const float scale = ScaleOfRow(part, true, AccumulatorRow(gpu::Lane(), i), shared);
      scores[t][i] *= facts.live[i / 2] ? scale : 0;
    }
    TurnWeights<Shape::kType>(scores[t], weights[t]);
  }
  AddPacked<Shape, kGroup>(part, entry, shared, weights, state);
}

// This warp's slices of the part.
template <class Shape, std::uint32_t kGroup>
TESSERA_DEVICE void AttendPackedSlices(const AttendParams& params, const PackedPart& part,
                                       const PartTiles& tiles, std::byte* shared,
                                       PackedState<Shape>& state) {
  constexpr std::uint32_t kMost = Shape::kTuning.most_stages - 1;
  constexpr std::uint32_t kLeast = Shape::kTuning.least_stages - 1;
  const std::uint32_t stage_bytes = part.stage.bytes();
  const bool deep = Shape::kTuning.most_stages * stage_bytes <= Shape::kWarpBytes;
  const auto fetch = [&](std::uint32_t entry, std::byte* stage) {
    FetchPacked(part, tiles, entry, stage);
  };
  const auto attend = [&](std::uint32_t entry, const std::byte* stage) {
    AttendPackedSlice<Shape, kGroup>(params, part, entry, stage, state);
  };
  WalkSlices<kMost, kLeast, Shape::kStageEntries>(
      part.live, {.shared = shared, .stage_bytes = stage_bytes, .ahead = deep ? kMost : kLeast},
      fetch, attend);
}

// The kernel's body. blockIdx.y picks the columns.
template <ValueType kValues, std::uint32_t kHeadDim, std::uint32_t kColumnTiles>
TESSERA_DEVICE void AttendPacked(const AttendParams& params) {
  using Shape = PackedShape<kValues, kHeadDim, kColumnTiles>;
  const StepReader step(params.step);
  std::byte* shared = gpu::SharedMemory();
  const std::uint32_t works = CountWorks(params, step);
  const std::uint32_t first_column = gpu::BlockY() * Shape::kColumns;
  for (std::uint32_t index = gpu::BlockX(); index < works; index += gpu::GridX()) {
    const Work work = LocateWork(params, step, index);
    if (work.part.kind != KindOf({.format = PackedFormat(kValues)})) continue;
    const StepSequence& sequence = step.sequence(work.lane / step.layer(params.layer).kv_heads);
    const StepStrategy& strategy = step.strategy(params.layer, work.part.strategy);
    PartTiles tiles;
    const bool found = tiles.Find(step.arena(), work.part, TileBytesOf(params, step, work.part, 0));
    ReportWork(params, sequence, work, found);
    PackedState<Shape> state;
    ClearState<Shape>(params, sequence, work, first_column, state);
    LoadRotated<Shape>(params, sequence, work.part.strategy, first_column, state);
    // Warps may disagree on `found`; none may miss the barriers below.
    const PackedPart part = {
        .tile = strategy.layout,
        .stage = StageLayout(strategy.layout),
        .groups = static_cast<std::uint32_t>(strategy.shape.channels / strategy.shape.group),
        .live = found ? work.part.entries : EntryRange{},
        .words = WordsOf(strategy)};
    std::byte* const own = shared + gpu::Warp() * Shape::kWarpBytes;
    if (strategy.shape.group == 2) {
      AttendPackedSlices<Shape, 2>(params, part, tiles, own, state);
    } else if (strategy.shape.group == 4) {
      AttendPackedSlices<Shape, 4>(params, part, tiles, own, state);
    } else {
      AttendPackedSlices<Shape, 1>(params, part, tiles, own, state);
    }
    LeaveResult<Shape::kType, Shape>(state, shared, [](std::uint32_t s, std::uint32_t i) {
      return PairChannel(kHeadDim, ValueSlice(gpu::Lane()), s) + i / 2;
    });
    gpu::SyncBlock();
    StoreResult<Shape>(params, sequence, work, first_column, shared);
    gpu::SyncBlock();
  }
}

}  // namespace tessera::kernels::cuda
