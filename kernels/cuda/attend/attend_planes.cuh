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

#include "kernels/cuda/attend/planes_part.cuh"
#include "kernels/cuda/attend/planes_products.cuh"
#include "kernels/cuda/common/gpu.cuh"
#include "kernels/cuda/common/planes_index.h"
#include "kernels/cuda/common/slices.cuh"
#include "kernels/cuda/common/work.cuh"

namespace tessera::kernels::cuda {

// What a thread needs to know about its rows of a slice whose entries not every column sees.
struct QuadFacts {
  bool live[kTileEntries / kGroupRows][2];
  std::uint32_t place[kTileEntries / kGroupRows][2];  // as in RowFacts
  float bias[kTileEntries / kGroupRows][2];
};

// What a kernel asks about the rows of a part: of a whole one, `rows` are its live entries.
TESSERA_DEVICE bool IsLiveRow(EntryRange live, std::uint32_t entry) { return live.Contains(entry); }
TESSERA_DEVICE std::uint32_t PlaceOfRow(EntryRange, std::uint32_t entry) { return entry; }
// The entries of the part that every column sees. `seen`: the range of places that each sees.
TESSERA_DEVICE EntryRange WholeRows(EntryRange, EntryRange seen) { return seen; }

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

// Handles a part from clearing the state to storing the result. `range`: the entries to walk;
// `live`: the places that some query sees. fetch(entry, stage) starts the copies of a slice.
// Block-collective.
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
  state.whole = WholeRows(rows, state.whole);
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
    const std::uint32_t pair = ChannelPairOf(Shape::kHeadDim, gpu::Lane(), s % Shape::kValueSteps);
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
