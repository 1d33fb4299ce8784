// Attention over one part of a segment in planes, on tensor cores. Work items and partial results
// are those of attend_mma.cuh. Nothing is decoded; planes_index.h says how words become operands:
//
//   a stage   eight quads as the tile stores them, then weights and positions of their rows
//   scores    codes of K times int8 codes of the query, exact in int32; scales of row and query
//             are applied once per row, column and half
//   output    codes of V times (weight x scale of the row), rounded to bf16. The operands are 128 +
//             code; the sum of the rounded weights, a product with ones, takes the constant away
//             again when the part ends
//
// A warp walks every kTuning.warps-th slice of 32 rows with one online softmax step for each. The
// result is in V's rotated space; the merge kernel rotates it back and adds the mean.
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
    const std::uint64_t other = gpu::Shuffle(
        range.begin | static_cast<std::uint64_t>(range.end) << 32, gpu::Lane() ^ mask);
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

// Two neighbouring words: those of a lane's two rows of K.
struct WordPair {
  std::uint32_t low;
  std::uint32_t high;
};

TESSERA_DEVICE WordPair LoadPair(const std::byte* shared) {
  const auto both = *reinterpret_cast<const std::uint64_t*>(shared);
  return {.low = static_cast<std::uint32_t>(both), .high = static_cast<std::uint32_t>(both >> 32)};
}

TESSERA_DEVICE float Bf16At(const std::byte* shared, std::uint32_t half) {
  const std::uint32_t pair = *reinterpret_cast<const std::uint32_t*>(shared);
  return std::bit_cast<float>(half == 0 ? pair << 16 : pair & 0xffff0000u);
}

template <class Shape>
TESSERA_DEVICE void MultiplyCodes(const QuadOperand& key, std::uint32_t half, std::uint32_t step,
                                  const QuadState<Shape>& state,
                                  std::int32_t (&dots)[Shape::kColumnTiles][4]) {
  TESSERA_UNROLL
  for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
    gpu::MmaBytes(dots[t], key.a, state.query[t][half][step]);
  }
}

// dots[t]: 16 rows x 8 columns of one half. `quad` is the lane's quad, from its first slot on.
template <class Shape>
TESSERA_DEVICE void ScoreHalf(const HalfPlane& plane, const std::byte* quad, std::uint32_t half,
                              const QuadState<Shape>& state,
                              std::int32_t (&dots)[Shape::kColumnTiles][4]) {
  constexpr std::uint32_t kWordBytes = kQuadRows * 4;
  const std::uint32_t first = KeyStepOf(Shape::kHeadDim, gpu::Lane(), 0);
  TESSERA_UNROLL
  for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < 4; ++i) dots[t][i] = 0;
  }
  if (plane.has_nibbles()) {
    const std::byte* words = quad + plane.words + first * kWordBytes;
    TESSERA_UNROLL
    for (std::uint32_t s = 0; s < Shape::kKeySteps; ++s) {
      const WordPair pair = LoadPair(words + s * kWordBytes);
      MultiplyCodes<Shape>(KeyNibbles(pair.low, pair.high), half, s, state, dots);
    }
    if (plane.has_crumbs()) {
      TESSERA_UNROLL
      for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
        TESSERA_UNROLL
        for (std::uint32_t i = 0; i < 4; ++i) dots[t][i] *= 4;
      }
    }
  }
  if (plane.has_crumbs()) {
    const std::byte* words = quad + plane.crumbs + first / 2 * kWordBytes;
    TESSERA_UNROLL
    for (std::uint32_t s = 0; s < Shape::kKeySteps; ++s) {
      const WordPair pair = LoadPair(words + s / 2 * kWordBytes);
      const std::uint32_t shift = 4 * ((Shape::kKeySteps == 1 ? first : s) % 2);
      MultiplyCodes<Shape>(KeyCrumbs(pair.low, pair.high, shift), half, s, state, dots);
    }
  }
  if (plane.has_bytes()) {
    const std::byte* words = quad + plane.words + 2 * first * kWordBytes;
    TESSERA_UNROLL
    for (std::uint32_t s = 0; s < Shape::kKeySteps; ++s) {
      const WordPair front = LoadPair(words + 2 * s * kWordBytes);
      const WordPair back = LoadPair(words + (2 * s + 1) * kWordBytes);
      MultiplyCodes<Shape>({{front.low, front.high, back.low, back.high}}, half, s, state, dots);
    }
  }
}

// logits[t]: 16 rows x 8 columns, in log2 units and without the soft-cap.
template <class Shape>
TESSERA_DEVICE void ScoreGroup(const QuadPart& part, const std::byte* quads, std::uint32_t group,
                               const QuadState<Shape>& state,
                               float (&logits)[Shape::kColumnTiles][4]) {
  const std::uint32_t slot = KeySlotOf(gpu::Lane());
  const std::byte* quad = quads + (group * kGroupQuads + KeyQuadOf(gpu::Lane())) * part.quad_bytes;
  TESSERA_UNROLL
  for (std::uint32_t h = 0; h < kHalves; ++h) {
    std::int32_t dots[Shape::kColumnTiles][4];
    ScoreHalf<Shape>(part.key[h], quad + slot * 4, h, state, dots);
    const std::byte* scales = quad + part.key[h].scales + slot * 2;
    TESSERA_UNROLL
    for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < 4; ++i) {
        const float centred =
            static_cast<float>(dots[t][i]) * state.scale[t][h][i % 2] - state.offset[t][h][i % 2];
        logits[t][i] =
            centred * Bf16At(scales, i / 2) + (h == 0 ? state.mean[t][i % 2] : logits[t][i]);
      }
    }
  }
}

// What a thread needs to know about its rows of a slice whose entries not every column sees.
struct QuadFacts {
  bool live[kTileEntries / kGroupRows][2];
  std::uint32_t place[kTileEntries / kGroupRows][2];  // as in RowFacts
  float bias[kTileEntries / kGroupRows][2];
};

TESSERA_DEVICE bool IsLiveRow(EntryRange live, std::uint32_t entry) { return live.Contains(entry); }
TESSERA_DEVICE std::uint32_t PlaceOfRow(EntryRange, std::uint32_t entry) { return entry; }

// `rows`: the part's live entries, or its SelectedRows.
template <class Rows>
TESSERA_DEVICE QuadFacts ReadQuadFacts(const Rows& rows, std::uint32_t entry,
                                       const TileWords& words, const std::byte* shared) {
  QuadFacts facts;
  TESSERA_UNROLL
  for (std::uint32_t g = 0; g < kTileEntries / kGroupRows; ++g) {
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < 2; ++i) {
      const std::uint32_t row = QuadRowOf(gpu::Lane(), g, i);
      const auto* word = reinterpret_cast<const std::uint32_t*>(shared) + row;
      facts.live[g][i] = IsLiveRow(rows, entry + row);
      facts.place[g][i] = words.positions ? word[kTileEntries] : PlaceOfRow(rows, entry + row);
      facts.bias[g][i] = words.weights ? gpu::Log2(std::bit_cast<float>(*word)) : 0;
    }
  }
  return facts;
}

inline constexpr std::uint32_t kSliceGroups = kTileEntries / kGroupRows;

template <class Shape>
TESSERA_DEVICE void MaskQuads(const AttendParams& params, const QuadFacts& facts,
                              const QuadState<Shape>& state,
                              float (&logits)[kSliceGroups][Shape::kColumnTiles][4]) {
  TESSERA_UNROLL
  for (std::uint32_t g = 0; g < kSliceGroups; ++g) {
    TESSERA_UNROLL
    for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < 4; ++i) {
        const bool seen =
            facts.live[g][i / 2] && state.visible[t][i % 2].Contains(facts.place[g][i / 2]);
        float& logit = logits[g][t][i];
        logit = seen ? BoundLogit(params, logit) + facts.bias[g][i / 2] : gpu::NegativeInfinity();
      }
    }
  }
}

// Raises column tile t's maxima and rescales what was added up so far.
template <class Shape>
TESSERA_DEVICE void RaiseMaximum(std::uint32_t t, const float (&top)[2], QuadState<Shape>& state,
                                 float (&logits)[kSliceGroups][Shape::kColumnTiles][4]) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  float factor[2];
  TESSERA_UNROLL
  for (std::uint32_t c = 0; c < 2; ++c) {
    const float next = gpu::Max(state.maximum[t][c], top[c] > kLargest ? kLargest : top[c]);
    factor[c] = gpu::FastExp2(state.maximum[t][c] - next);
    state.maximum[t][c] = next;
    state.sum[t][c] *= factor[c];
  }
  TESSERA_UNROLL
  for (std::uint32_t i = 0; i < 4; ++i) {
    TESSERA_UNROLL
    for (std::uint32_t s = 0; s < Shape::kSteps; ++s) state.output[t][s][i] *= factor[i % 2];
    TESSERA_UNROLL
    for (std::uint32_t h = 0; h < kHalves; ++h) state.weights[t][h][i] *= factor[i % 2];
    // An overflowed logit wins instead of making the sum NaN.
    TESSERA_UNROLL
    for (std::uint32_t g = 0; g < kSliceGroups; ++g) {
      float& logit = logits[g][t][i];
      logit = logit > kLargest ? kLargest : logit;
    }
  }
}

// Turns logits into weights relative to the column's maximum.
template <class Shape>
TESSERA_DEVICE void WeighQuads(QuadState<Shape>& state,
                               float (&logits)[kSliceGroups][Shape::kColumnTiles][4]) {
  TESSERA_UNROLL
  for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
    float top[2];
    TESSERA_UNROLL
    for (std::uint32_t c = 0; c < 2; ++c) {
      top[c] = MaxOverRows(gpu::Max(gpu::Max(logits[0][t][c], logits[0][t][c + 2]),
                                    gpu::Max(logits[1][t][c], logits[1][t][c + 2])));
    }
    const bool higher = top[0] > state.maximum[t][0] || top[1] > state.maximum[t][1];
    if (gpu::Ballot(higher) != 0) RaiseMaximum<Shape>(t, top, state, logits);
    TESSERA_UNROLL
    for (std::uint32_t g = 0; g < kSliceGroups; ++g) {
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < 4; ++i) {
        float& weight = logits[g][t][i];
        weight = gpu::FastExp2(weight - state.maximum[t][i % 2]);
        state.sum[t][i % 2] += weight;
      }
    }
  }
}

// The B operand of weights x scales of a group of rows.
struct WeightOperand {
  std::uint32_t b[2];
};

TESSERA_DEVICE WeightOperand ScaleWeights(const float (&weights)[4], const float (&scales)[2],
                                          float factor) {
  float scaled[4];
  TESSERA_UNROLL
  for (std::uint32_t i = 0; i < 4; ++i) scaled[i] = weights[i] * (scales[i / 2] * factor);
  WeightOperand operand;
  TransposeWeights<ElementType::kBf16>(scaled, operand.b);
  return operand;
}

template <class Shape>
TESSERA_DEVICE void AddCodes(const std::uint32_t (&value)[4], std::uint32_t step,
                             const WeightOperand (&weights)[Shape::kColumnTiles],
                             QuadState<Shape>& state) {
  TESSERA_UNROLL
  for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
    gpu::Mma<ElementType::kBf16>(state.output[t][step], value, weights[t].b);
  }
}

// Words of one run of a lane.
template <std::uint32_t kCount>
TESSERA_DEVICE void LoadWords(const std::byte* shared, std::uint32_t (&words)[kCount]) {
  struct alignas(kCount % 4 == 0 ? 16 : kCount * 4) Run {
    std::uint32_t words[kCount];
  };
  const Run run = *reinterpret_cast<const Run*>(shared);
  TESSERA_UNROLL
  for (std::uint32_t i = 0; i < kCount; ++i) words[i] = run.words[i];
}

// Adds one half of a group of rows: output += codes of V x weights. `upper` are the weights times
// UpperFactor. `quad` is the lane's quad.
template <class Shape>
TESSERA_DEVICE void AddHalf(const HalfPlane& plane, const std::byte* quad, std::uint32_t half,
                            const WeightOperand (&weights)[Shape::kColumnTiles],
                            const WeightOperand (&upper)[Shape::kColumnTiles],
                            QuadState<Shape>& state) {
  constexpr std::uint32_t kRun = ValueRun(Shape::kHeadDim);
  const std::uint32_t ones = gpu::InRegister(kExponents);
  const auto nibble = [&](std::uint32_t word) { return gpu::AndOr<kNibblePair>(word, ones); };
  const auto crumb = [&](std::uint32_t word) { return gpu::AndOr<kCrumbPair>(word, ones); };
  TESSERA_UNROLL
  for (std::uint32_t run = 0; run < Shape::kValueSteps / kRun; ++run) {
    const std::uint32_t pair = ChannelPairOf(Shape::kHeadDim, gpu::Lane(), run * kRun);
    const std::uint32_t step = half * Shape::kValueSteps + run * kRun;
    if (plane.has_nibbles()) {
      std::uint32_t words[kRun];
      LoadWords(quad + plane.words + pair * 4, words);
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < kRun; ++i) {
        const std::uint32_t w = words[i];
        AddCodes<Shape>({nibble(w), nibble(w >> 4), nibble(w >> 8), nibble(w >> 12)}, step + i,
                        upper, state);
      }
    }
    if (plane.has_crumbs()) {
      std::uint32_t words[kRun / 2];
      LoadWords(quad + plane.crumbs + pair / 2 * 4, words);
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < kRun; ++i) {
        const std::uint32_t w = words[i / 2] >> (4 * (i % 2));
        AddCodes<Shape>({crumb(w), crumb(w >> 2), crumb(w >> 8), crumb(w >> 10)}, step + i,
                        weights, state);
      }
    }
    if (plane.has_bytes()) {
      std::uint32_t words[2 * kRun];
      LoadWords(quad + plane.words + 2 * pair * 4, words);
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < kRun; ++i) {
        const std::uint32_t u = words[2 * i];
        const std::uint32_t v = words[2 * i + 1];
        AddCodes<Shape>({nibble(u >> 4), nibble(v >> 4), nibble(u >> 12), nibble(v >> 12)},
                        step + i, upper, state);
        AddCodes<Shape>({nibble(u), nibble(v), nibble(u >> 8), nibble(v >> 8)}, step + i, weights,
                        state);
      }
    }
  }
}

// output += V x weights for a group of 16 rows. Rows that are not live have weight 0; their scale
// may be anything and counts as 0.
template <class Shape>
TESSERA_DEVICE void AddGroup(const QuadPart& part, const std::byte* quads, std::uint32_t group,
                             const bool (&live)[2],
                             const float (&weights)[Shape::kColumnTiles][4],
                             QuadState<Shape>& state) {
  constexpr std::uint32_t kOne = 0x3f803f80u;  // a pair
  constexpr std::uint32_t kOnes[4] = {kOne, 0, kOne, 0};
  const std::byte* first = quads + group * kGroupQuads * part.quad_bytes;
  const std::byte* rows =
      first + KeyQuadOf(gpu::Lane()) * part.quad_bytes + KeySlotOf(gpu::Lane()) * 2;
  const std::byte* values = first + ValueQuadOf(gpu::Lane()) * part.quad_bytes;
  WeightOperand operand[Shape::kColumnTiles] = {};
  float scales[2] = {};
  TESSERA_UNROLL
  for (std::uint32_t h = 0; h < kHalves; ++h) {
    const HalfPlane& plane = part.value[h];
    if (h == 0 || part.two_values) {
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < 2; ++i) {
        scales[i] = live[i] ? Bf16At(rows + plane.scales, i) : 0;
      }
      TESSERA_UNROLL
      for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
        operand[t] = ScaleWeights(weights[t], scales, 1);
        gpu::Mma<ElementType::kBf16>(state.weights[t][h], kOnes, operand[t].b);
      }
    }
    WeightOperand upper[Shape::kColumnTiles];
    TESSERA_UNROLL
    for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
      upper[t] = operand[t];
      if (plane.width > 4) {
        upper[t] = ScaleWeights(weights[t], scales, UpperFactor(plane.width));
      }
    }
    AddHalf<Shape>(plane, values, h, operand, upper, state);
  }
}

// One slice: 32 rows from `entry` on, whose quads are in `stage`.
template <class Shape, class Rows>
TESSERA_DEVICE void AttendQuads(const AttendParams& params, const QuadPart& part, const Rows& rows,
                                std::uint32_t entry, const std::byte* stage,
                                QuadState<Shape>& state) {
  float weights[kSliceGroups][Shape::kColumnTiles][4] = {};
  TESSERA_UNROLL
  for (std::uint32_t g = 0; g < kSliceGroups; ++g) {
    ScoreGroup<Shape>(part, stage, g, state, weights[g]);
  }
  bool live[kSliceGroups][2] = {{true, true}, {true, true}};
  if (entry < state.whole.begin || entry + kTileEntries > state.whole.end) {
    const QuadFacts facts = ReadQuadFacts(rows, entry, part.words, stage + part.words_at());
    MaskQuads<Shape>(params, facts, state, weights);
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < kSliceGroups * 2; ++i) {
      live[i / 2][i % 2] = facts.live[i / 2][i % 2];
    }
  }
  WeighQuads<Shape>(state, weights);
  TESSERA_UNROLL
  for (std::uint32_t g = 0; g < kSliceGroups; ++g) {
    AddGroup<Shape>(part, stage, g, live[g], weights[g], state);
  }
}

// Takes the constants of the operands away from the output.
template <class Shape>
TESSERA_DEVICE void CentreOutput(const QuadPart& part, QuadState<Shape>& state) {
  TESSERA_UNROLL
  for (std::uint32_t h = 0; h < kHalves; ++h) {
    const float centre = ValueCentre(part.value[h].width);
    TESSERA_UNROLL
    for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < 4; ++i) {
        const float sum = part.two_values ? state.weights[t][h][i % 2] : state.weights[t][0][i % 2];
        TESSERA_UNROLL
        for (std::uint32_t s = 0; s < Shape::kValueSteps; ++s) {
          state.output[t][h * Shape::kValueSteps + s][i] -= centre * sum;
        }
      }
    }
  }
}

// Starts copying a tile's quads and words.
TESSERA_DEVICE void FetchTile(const QuadPart& part, const std::byte* tile, std::byte* stage) {
  const std::uint32_t end = part.words_at();
  constexpr std::uint32_t kRound = kWarp * kChunkBytes;
  TESSERA_UNROLL
  for (std::uint32_t at = 0; at < end; at += kRound) {
    const std::uint32_t own = at + gpu::Lane() * kChunkBytes;
    if (at + kRound <= end || own < end) gpu::CopyChunk(stage + own, tile + own, true);
  }
  const std::uint32_t row = gpu::Lane() * 4;
  if (part.words.weights) gpu::CopyWord(stage + end + row, tile + part.words.weights_at + row);
  if (part.words.positions) {
    gpu::CopyWord(stage + end + kTileEntries * 4 + row, tile + part.words.positions_at + row);
  }
}

// Handles a part from clearing the state to storing the result. fetch(entry, stage) starts the
// copies of a slice. Block-collective.
template <class Shape, class Rows, class Fetch>
TESSERA_DEVICE void AttendQuadPart(const AttendParams& params, const StepSequence& sequence,
                                   const Work& work, const QuadPart& part, const Rows& rows,
                                   EntryRange range, EntryRange live, Fetch fetch,
                                   std::byte* shared) {
  constexpr std::uint32_t kMost = Shape::kTuning.most_stages - 1;
  const std::uint32_t first_column = gpu::BlockY() * Shape::kColumns;
  const std::uint32_t stage_bytes = part.stage_bytes();
  std::uint32_t ahead = 0;
  while (ahead < kMost && (ahead + 2) * stage_bytes <= Shape::kWarpBytes) ++ahead;
  QuadState<Shape> state;
  ClearQuads<Shape>(params, sequence, work, part, live, first_column, state);
  LoadCodes<Shape>(params, sequence, part, work.part.strategy, first_column, state);
  const auto attend = [&](std::uint32_t entry, const std::byte* stage) {
    AttendQuads<Shape>(params, part, rows, entry, stage, state);
  };
  WalkSlices<kMost, Shape::kStageEntries, kTileEntries>(
      range,
      {.shared = shared + gpu::Warp() * Shape::kWarpBytes,
       .stage_bytes = stage_bytes,
       .ahead = ahead},
      fetch, attend);
  CentreOutput<Shape>(part, state);
  StoreWarpResult<ElementType::kBf16, Shape>(state, shared, [](std::uint32_t s, std::uint32_t i) {
    const std::uint32_t pair =
        ChannelPairOf(Shape::kHeadDim, gpu::Lane(), s % Shape::kValueSteps);
    return s / Shape::kValueSteps * (Shape::kHeadDim / kHalves) + 2 * pair + i / 2;
  });
  gpu::SyncBlock();
  StoreResult<Shape>(params, sequence, work, first_column, shared);
  gpu::SyncBlock();
}

// Kernel body. blockIdx.y selects the columns.
template <std::uint32_t kHeadDim, std::uint32_t kColumnTiles, PartKind kKind>
TESSERA_DEVICE void AttendPlanes(const AttendParams& params) {
  using Shape = QuadShape<kHeadDim, kColumnTiles>;
  const StepReader step(params.step);
  std::byte* shared = gpu::SharedMemory();
  const std::uint32_t works = CountWorks(params, step);
  for (std::uint32_t index = gpu::BlockX(); index < works; index += gpu::GridX()) {
    const Work work = LocateWork(params, step, index);
    if (work.part.kind != kKind) continue;
    const StepSequence& sequence = step.sequence(work.lane / step.layer(params.layer).kv_heads);
    const StepStrategy& strategy = step.strategy(params.layer, work.part.strategy);
    PartTiles tiles;
    const bool found = tiles.Find(step.arena(), work.part, TileBytesOf(params, step, work.part, 0));
    ReportWork(params, sequence, work, found);
    const QuadPart part = QuadPartOf<kHeadDim, kKind>(strategy);
    // Warps may disagree on `found`; none may skip the barriers at the end of the part.
    const EntryRange live = found ? work.part.entries : EntryRange{};
    const auto fetch = [&](std::uint32_t entry, std::byte* stage) {
      FetchTile(part, tiles.Address(entry / kTileEntries), stage);
    };
    AttendQuadPart<Shape>(params, sequence, work, part, live, live, live, fetch, shared);
  }
}

}  // namespace tessera::kernels::cuda
