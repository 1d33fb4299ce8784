// What a warp knows of a part in planes: the widths and places of its segment, the codes of the
// query rows, and the softmax so far.
#pragma once

#include <cstdint>
#include <limits>

#include "kernels/cuda/common/fragment.h"
#include "kernels/cuda/common/gpu.cuh"
#include "kernels/cuda/common/planes_index.h"
#include "kernels/cuda/common/slices.cuh"
#include "kernels/cuda/common/work.cuh"

namespace tessera::kernels::cuda {

// Bytes of a stage for the optional words of 32 rows: weights, then positions.
inline constexpr std::uint32_t kQuadWordBytes = 2 * kTileEntries * 4;

// Shape of one kernel and its shared memory:
//   per warp   stages x (8 quads | with words: 32 weights, 32 positions)
//   then       maximum and sum per warp and column
// A stage's size depends on the widths. After its last slice a warp reuses its stages for its
// output.
template <std::uint32_t kHeadDimValue, std::uint32_t kColumnTilesValue>
struct QuadShape {
  static constexpr std::uint32_t kHeadDim = kHeadDimValue;
  static constexpr std::uint32_t kColumnTiles = kColumnTilesValue;
  static constexpr PlanesTuning kTuning = PlanesTuningFor(kHeadDim);
  static constexpr std::uint32_t kColumns = kColumnTiles * kTileColumns;
  static constexpr std::uint32_t kThreads = kTuning.warps * kWarp;
  static constexpr std::uint32_t kSteps = kHeadDim / 16;
  static constexpr std::uint32_t kKeySteps = KeySteps(kHeadDim);      // per half
  static constexpr std::uint32_t kValueSteps = ValueSteps(kHeadDim);  // likewise
  static constexpr std::uint32_t kStageEntries = kTuning.warps * kTileEntries;
  static constexpr std::uint32_t kOutputRow = kHeadDim + 4;
  static constexpr std::uint32_t kWarpBytes = kTuning.stage_bytes;
  static constexpr std::uint32_t kStateOffset = kTuning.warps * kWarpBytes;
  static constexpr std::uint32_t kSharedBytes = kStateOffset + kTuning.warps * kColumns * 2 * 4;
  static_assert(kSteps == kHalves * kValueSteps);
  static_assert(kColumns * kOutputRow * 4 <= kWarpBytes && kWarpBytes % kChunkBytes == 0);
  static_assert(kTuning.stage_bytes / 2 >=
                kTileQuads * QuadLayoutOf(kHeadDim, {8, 8}, {8, 8}).bytes);
};

// One warp's registers for one part.
template <class Shape>
struct QuadState : SoftmaxState<Shape> {
  std::uint32_t query[Shape::kColumnTiles][kHalves][Shape::kKeySteps][2];
  // Of the accumulators' columns, in log2 units: a logit is the sum over halves of
  // row scale x (dot x scale - offset), plus `mean`.
  float scale[Shape::kColumnTiles][kHalves][2];
  float offset[Shape::kColumnTiles][kHalves][2];
  float mean[Shape::kColumnTiles][2];
  // The sums of the rounded weights of each half's plane, in the first two; the others stay 0.
  float weights[Shape::kColumnTiles][kHalves][4];
  // Entries that every column sees; none if the words of a row decide.
  EntryRange whole;
};

// The part's segment, as its warps read it.
struct QuadPart {
  HalfPlane key[kHalves];
  HalfPlane value[kHalves];
  std::uint32_t quad_bytes;
  bool two_values;  // planes of V
  TileWords words;

  TESSERA_DEVICE std::uint32_t words_at() const { return kTileQuads * quad_bytes; }
  TESSERA_DEVICE std::uint32_t stage_bytes() const {
    return words_at() + (words.weights || words.positions ? kQuadWordBytes : 0);
  }
};

TESSERA_DEVICE QuadPart QuadPartOf(const TileShape& shape, const QuadLayout& quad,
                                   const TileWords& words) {
  QuadPart part;
  TESSERA_UNROLL
  for (std::uint32_t h = 0; h < kHalves; ++h) {
    part.key[h] = HalfPlaneOf(shape, quad, false, h);
    part.value[h] = HalfPlaneOf(shape, quad, true, h);
  }
  part.quad_bytes = quad.bytes;
  part.two_values = shape.value_planes.second != 0;
  part.words = words;
  return part;
}

// The kernel of kNearPlanes knows the widths, so its code has no branch on them.
template <std::uint32_t kHeadDim, PartKind kKind>
TESSERA_DEVICE QuadPart QuadPartOf(const StepStrategy& strategy) {
  if constexpr (kKind == PartKind::kNearPlanes) {
    constexpr TileShape kShape = PlanesShape(kHeadDim, kNearKey, kNearValue);
    constexpr QuadLayout kQuad = QuadLayoutOf(kHeadDim, kNearKey, kNearValue);
    return QuadPartOf(kShape, kQuad, WordsOf(strategy));
  } else {
    return QuadPartOf(strategy.shape, strategy.layout.quad, WordsOf(strategy));
  }
}

// The range that all lanes' ranges have in common. Warp-collective.
TESSERA_DEVICE EntryRange CommonRange(EntryRange range) {
  TESSERA_UNROLL
  for (std::uint32_t mask = 1; mask < kWarp; mask *= 2) {
    const std::uint64_t other =
        gpu::Shuffle(range.begin | static_cast<std::uint64_t>(range.end) << 32, gpu::Lane() ^ mask);
    const auto begin = static_cast<std::uint32_t>(other);
    const auto end = static_cast<std::uint32_t>(other >> 32);
    range.begin = begin > range.begin ? begin : range.begin;
    range.end = end < range.end ? end : range.end;
  }
  return range;
}

// Loads the codes of the query rows and what belongs to the accumulators' columns; zeros after the
// last row.
template <class Shape>
TESSERA_DEVICE void LoadCodes(const AttendParams& params, const StepSequence& sequence,
                              const QuadPart& part, std::uint32_t strategy,
                              std::uint32_t first_column, QuadState<Shape>& state) {
  const std::uint32_t columns = sequence.queries * params.group;
  const std::uint32_t limit = columns < params.max_columns ? columns : params.max_columns;
  const std::uint64_t first_slot = std::uint64_t{strategy} * params.max_columns;
  const auto row_of = [&](std::uint32_t column) {
    return reinterpret_cast<const std::byte*>(params.rotated +
                                              (first_slot + column) * Shape::kHeadDim);
  };
  TESSERA_UNROLL
  for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
    const std::uint32_t tile_column = first_column + t * kTileColumns;
    const std::uint32_t column = tile_column + OperandBColumn(gpu::Lane());
    TESSERA_UNROLL
    for (std::uint32_t h = 0; h < kHalves; ++h) {
      TESSERA_UNROLL
      for (std::uint32_t s = 0; s < Shape::kKeySteps; ++s) {
        const std::uint32_t step = KeyStepOf(Shape::kHeadDim, gpu::Lane(), s);
        TESSERA_UNROLL
        for (std::uint32_t r = 0; r < 2; ++r) {
          const std::uint32_t channel = h * Shape::kHeadDim / kHalves + KeyChannelOf(step, r);
          state.query[t][h][s][r] =
              column < limit ? *reinterpret_cast<const std::uint32_t*>(row_of(column) + channel)
                             : 0;
        }
      }
    }
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < 2; ++i) {
      const std::uint32_t own = tile_column + AccumulatorColumn(gpu::Lane(), i);
      CodedQuery coded = {};
      if (own < limit) {
        coded = *reinterpret_cast<const CodedQuery*>(row_of(own) + Shape::kHeadDim);
      }
      TESSERA_UNROLL
      for (std::uint32_t h = 0; h < kHalves; ++h) {
        state.scale[t][h][i] = coded.scale[h] * params.logit_scale;
        state.offset[t][h][i] =
            state.scale[t][h][i] * (coded.sum[h] * KeyCentre(part.key[h].width));
      }
      state.mean[t][i] = coded.mean_product * params.logit_scale;
    }
  }
}

// Begins a part. `live`: entries that some query sees; columns after the last one count as if they
// saw all of these, since their results are not stored.
template <class Shape>
TESSERA_DEVICE void ClearQuads(const AttendParams& params, const StepSequence& sequence,
                               const Work& work, const QuadPart& part, EntryRange live,
                               std::uint32_t first_column, QuadState<Shape>& state) {
  ClearState<Shape>(params, sequence, work, first_column, state);
  const std::uint32_t columns = sequence.queries * params.group;
  EntryRange whole = live;
  TESSERA_UNROLL
  for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < 2; ++i) {
      const EntryRange seen = state.visible[t][i];
      // Finite, so that subtracting it from -infinity is -infinity.
      state.maximum[t][i] = -std::numeric_limits<float>::max();
      if (first_column + t * kTileColumns + AccumulatorColumn(gpu::Lane(), i) >= columns) continue;
      whole.begin = seen.begin > whole.begin ? seen.begin : whole.begin;
      whole.end = seen.end < whole.end ? seen.end : whole.end;
    }
    TESSERA_UNROLL
    for (std::uint32_t h = 0; h < kHalves; ++h) {
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < 4; ++i) state.weights[t][h][i] = 0;
    }
  }
  state.whole = CommonRange(whole);
  if (part.words.weights || part.words.positions || params.logit_cap > 0) state.whole = {};
}

}  // namespace tessera::kernels::cuda
