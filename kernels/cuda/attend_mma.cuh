// Attention over one part of a lane for bf16 and fp16, on tensor cores.
//
// A block takes work items (part of a lane, all query rows of its kv head, up to 8 or 16 at a time)
// in a grid-stride loop. Each of its warps walks every kTuning.warps-th slice of 16 entries on its
// own: copies it to shared memory a few slices ahead, scores it, and accumulates its own online
// softmax, without meeting the others. At the end of the part the warps' results are merged in warp
// order and stored for the merge kernel. So the bits depend on the part alone.
//
// Rows that no query of the call sees are never read; zeros stand in for them, since 0 x NaN of a
// dead row would be NaN.
#pragma once

#include <cstdint>

#include "kernels/cuda/fragment.h"
#include "kernels/cuda/gpu.cuh"
#include "kernels/cuda/work.cuh"

namespace tessera::kernels::cuda {

// One warp's registers for one part.
template <class Shape>
struct MmaState {
  std::uint32_t query[Shape::kColumnTiles][Shape::kSteps][2];
  EntryRange visible[Shape::kColumnTiles][2];
  float maximum[Shape::kColumnTiles][2];
  float sum[Shape::kColumnTiles][2];  // over this thread's rows only, until the part ends
  float output[Shape::kColumnTiles][Shape::kSteps][4];
};

// The B operands of all steps: two channels of a query row per register, zeros beyond the last row.
template <class Shape>
TESSERA_DEVICE void BeginPart(const AttendParams& params, const StepSequence& sequence,
                              const Work& work, std::uint32_t first_column,
                              MmaState<Shape>& state) {
  TESSERA_UNROLL
  for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
    const std::uint32_t tile_column = first_column + t * kTileColumns;
    const std::uint32_t column = tile_column + OperandBColumn(gpu::Lane());
    const bool live = column < sequence.queries * params.group;
    const std::byte* row = live ? QueryRowOf(params, sequence, work.kv_head, column, 2) : nullptr;
    TESSERA_UNROLL
    for (std::uint32_t s = 0; s < Shape::kSteps; ++s) {
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < 2; ++i) {
        const std::uint32_t channel = s * 16 + OperandBRow(gpu::Lane(), i);
        state.query[t][s][i] =
            live ? *reinterpret_cast<const std::uint32_t*>(row + channel * 2) : 0;
      }
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < 4; ++i) state.output[t][s][i] = 0;
    }
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < 2; ++i) {
      state.visible[t][i] = VisibleToColumn(params, sequence, work.part,
                                            tile_column + AccumulatorColumn(gpu::Lane(), i));
      state.maximum[t][i] = gpu::NegativeInfinity();
      state.sum[t][i] = 0;
    }
  }
}

// Starts copying 16 entries, from `entry` on, of K and V.
template <class Shape>
TESSERA_DEVICE void FetchSlice(const AttendParams& params, const PartTiles& tiles, EntryRange live,
                               std::uint32_t entry, std::byte* shared) {
  const DenseTile layout = {.head_dim = Shape::kHeadDim, .type = ElementType::kBf16};
  const std::byte* tile = tiles.Address(entry / kTileEntries);
  const std::uint32_t tile_row = entry % kTileEntries;
  TESSERA_UNROLL
  for (std::uint32_t i = 0; i < kSliceEntries * Shape::kRowChunks / kWarp; ++i) {
    const std::uint32_t piece = i * kWarp + gpu::Lane();
    const std::uint32_t row = piece / Shape::kRowChunks;
    const std::uint32_t chunk = piece % Shape::kRowChunks;
    const bool read = live.Contains(entry + row);
    const std::byte* source = tile + (tile_row + row) * Shape::kRowBytes + chunk * kChunkBytes;
    std::byte* place = shared + SwizzledOffset(row, chunk, Shape::kRowBytes);
    // A source that is not read must still be an address: the step image will do.
    gpu::CopyChunk(place, read ? source : params.step, read);
    gpu::CopyChunk(place + Shape::kSliceBytes, read ? source + layout.value_offset(0) : params.step,
                   read);
  }
}

// scores[t]: 16 entries x 8 columns, raw products.
template <ElementType kType, class Shape>
TESSERA_DEVICE void ScoreSlice(const std::byte* keys, const MmaState<Shape>& state,
                               float (&scores)[Shape::kColumnTiles][4]) {
  TESSERA_UNROLL
  for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < 4; ++i) scores[t][i] = 0;
  }
  const std::uint32_t entry = KeyMatrixEntry(gpu::Lane());
  TESSERA_UNROLL
  for (std::uint32_t s = 0; s < Shape::kSteps; ++s) {
    std::uint32_t key[4];
    const std::uint32_t chunk = s * 2 + KeyMatrixChunk(gpu::Lane());
    gpu::LoadMatrices(key, keys + SwizzledOffset(entry, chunk, Shape::kRowBytes));
    TESSERA_UNROLL
    for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
      gpu::Mma<kType>(scores[t], key, state.query[t][s]);
    }
  }
}

TESSERA_DEVICE float MaxOverRows(float value) {
  TESSERA_UNROLL
  for (std::uint32_t mask = 4; mask < kWarp; mask *= 2) {
    value = gpu::Max(value, gpu::ShuffleXor(value, mask));
  }
  return value;
}

TESSERA_DEVICE float SumOverRows(float value) {
  TESSERA_UNROLL
  for (std::uint32_t mask = 4; mask < kWarp; mask *= 2) {
    value += gpu::ShuffleXor(value, mask);
  }
  return value;
}

// Weights are 2^(x - maximum + shift). fp16 ends at 2^-24: with weights up to 2^15 instead of 1,
// what a long tail of small ones adds up to is not lost.
template <ElementType kType>
TESSERA_HOST_DEVICE constexpr float WeightShift() {
  return kType == ElementType::kFp16 ? 15.0f : 0.0f;
}

// One step of the online softmax for column tile t: scores become weights, and what was accumulated
// is scaled to the new maximum. Scaling by one is skipped, which changes no bit.
template <ElementType kType, class Shape>
TESSERA_DEVICE void WeighSlice(const AttendParams& params, std::uint32_t entry, std::uint32_t t,
                               MmaState<Shape>& state, float (&scores)[4]) {
  TESSERA_UNROLL
  for (std::uint32_t i = 0; i < 4; ++i) {
    const bool seen = state.visible[t][i % 2].Contains(entry + AccumulatorRow(gpu::Lane(), i));
    scores[i] = seen ? LogitOf(params, scores[i]) : gpu::NegativeInfinity();
  }
  float factor[2];
  TESSERA_UNROLL
  for (std::uint32_t c = 0; c < 2; ++c) {
    const float before = state.maximum[t][c];
    const float next = gpu::Max(before, MaxOverRows(gpu::Max(scores[c], scores[c + 2])));
    const float finite = next == gpu::NegativeInfinity() ? 0 : next;
    const float reference = finite - WeightShift<kType>();
    factor[c] = gpu::Exp2(before - finite);
    scores[c] = gpu::Exp2(scores[c] - reference);
    scores[c + 2] = gpu::Exp2(scores[c + 2] - reference);
    state.sum[t][c] = state.sum[t][c] * factor[c] + (scores[c] + scores[c + 2]);
    state.maximum[t][c] = next;
  }
  if (gpu::Ballot(factor[0] != 1 || factor[1] != 1) == 0) return;
  TESSERA_UNROLL
  for (std::uint32_t s = 0; s < Shape::kSteps; ++s) {
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < 4; ++i) state.output[t][s][i] *= factor[i % 2];
  }
}

template <ElementType kType, class Shape>
TESSERA_DEVICE void AttendSlice(const AttendParams& params, const std::byte* slice,
                                std::uint32_t entry, MmaState<Shape>& state) {
  float scores[Shape::kColumnTiles][4];
  ScoreSlice<kType, Shape>(slice, state, scores);
  std::uint32_t weights[Shape::kColumnTiles][2];
  TESSERA_UNROLL
  for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
    WeighSlice<kType, Shape>(params, entry, t, state, scores[t]);
    // From accumulator (row = entry) to B operand (k = entry): two 8 x 8 transpositions.
    weights[t][0] = gpu::TransposeMatrix(gpu::PackPair<kType>(scores[t][0], scores[t][1]));
    weights[t][1] = gpu::TransposeMatrix(gpu::PackPair<kType>(scores[t][2], scores[t][3]));
  }
  const std::byte* values = slice + Shape::kSliceBytes;
  const std::uint32_t row = ValueMatrixEntry(gpu::Lane());
  TESSERA_UNROLL
  for (std::uint32_t s = 0; s < Shape::kSteps; ++s) {
    std::uint32_t value[4];
    const std::uint32_t chunk = s * 2 + ValueMatrixChunk(gpu::Lane());
    gpu::LoadMatricesTransposed(value, values + SwizzledOffset(row, chunk, Shape::kRowBytes));
    TESSERA_UNROLL
    for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
      gpu::Mma<kType>(state.output[t][s], value, weights[t]);
    }
  }
}

// This warp's slices of `live`, fetched kTuning.stages - 1 ahead.
template <ElementType kType, class Shape>
TESSERA_DEVICE void AttendSlices(const AttendParams& params, const PartTiles& tiles,
                                 EntryRange live, std::byte* shared, MmaState<Shape>& state) {
  constexpr std::uint32_t kAhead = Shape::kTuning.stages - 1;
  const std::uint32_t first = live.begin / Shape::kStageEntries;
  const std::uint32_t last = live.empty() ? first : (live.end - 1) / Shape::kStageEntries + 1;
  const auto entry_of = [](std::uint32_t stage) {
    return stage * Shape::kStageEntries + gpu::Warp() * kSliceEntries;
  };
  const auto fetch = [&](std::uint32_t stage) {
    if (stage < last && live.Meets(entry_of(stage), kSliceEntries)) {
      FetchSlice<Shape>(params, tiles, live, entry_of(stage),
                        shared + (stage - first) % Shape::kTuning.stages * Shape::kStageBytes);
    }
    gpu::CommitCopies();
  };
  for (std::uint32_t i = 0; i < kAhead; ++i) fetch(first + i);
  for (std::uint32_t stage = first; stage < last; ++stage) {
    fetch(stage + kAhead);
    gpu::WaitCopies<kAhead>();
    gpu::SyncWarp();  // the other lanes' copies have landed too
    if (live.Meets(entry_of(stage), kSliceEntries)) {
      AttendSlice<kType, Shape>(
          params, shared + (stage - first) % Shape::kTuning.stages * Shape::kStageBytes,
          entry_of(stage), state);
    }
    gpu::SyncWarp();  // all lanes are done with the stage that the next fetch overwrites
  }
  gpu::WaitCopies<0>();
}

// Leaves this warp's result in shared memory: its output in its own stages, its state behind them.
template <ElementType kType, class Shape>
TESSERA_DEVICE void LeaveResult(const MmaState<Shape>& state, std::byte* shared) {
  auto* output = reinterpret_cast<float*>(shared + gpu::Warp() * Shape::kWarpBytes);
  auto* states =
      reinterpret_cast<float*>(shared + Shape::kStateOffset) + gpu::Warp() * Shape::kColumns * 2;
  TESSERA_UNROLL
  for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < 2; ++i) {
      const float sum = SumOverRows(state.sum[t][i]);
      const std::uint32_t column = t * kTileColumns + AccumulatorColumn(gpu::Lane(), i);
      if (gpu::Lane() < 4) {
        states[column * 2] = state.maximum[t][i] - WeightShift<kType>();
        states[column * 2 + 1] = sum;
      }
    }
    TESSERA_UNROLL
    for (std::uint32_t s = 0; s < Shape::kSteps; ++s) {
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < 4; ++i) {
        const std::uint32_t column = t * kTileColumns + AccumulatorColumn(gpu::Lane(), i);
        const std::uint32_t channel = s * 16 + AccumulatorRow(gpu::Lane(), i);
        output[column * Shape::kOutputRow + channel] = state.output[t][s][i];
      }
    }
  }
}

// Merges the warps' results in warp order into the work item's partial result.
template <class Shape>
TESSERA_DEVICE void StoreResult(const AttendParams& params, const StepSequence& sequence,
                                const Work& work, std::uint32_t first_column,
                                const std::byte* shared) {
  const std::uint32_t columns = sequence.queries * params.group;
  const std::uint32_t limit = columns < params.max_columns ? columns : params.max_columns;
  const auto* states = reinterpret_cast<const float*>(shared + Shape::kStateOffset);
  for (std::uint32_t i = gpu::Thread(); i < Shape::kColumns * Shape::kHeadDim;
       i += Shape::kThreads) {
    const std::uint32_t column = i / Shape::kHeadDim;
    const std::uint32_t channel = i % Shape::kHeadDim;
    if (first_column + column >= limit) break;
    float maximum = gpu::NegativeInfinity();
    TESSERA_UNROLL
    for (std::uint32_t w = 0; w < Shape::kTuning.warps; ++w) {
      maximum = gpu::Max(maximum, states[(w * Shape::kColumns + column) * 2]);
    }
    float sum = 0;
    float output = 0;
    TESSERA_UNROLL
    for (std::uint32_t w = 0; w < Shape::kTuning.warps; ++w) {
      const float* state = states + (w * Shape::kColumns + column) * 2;
      if (state[1] == 0) continue;  // saw nothing; a NaN is not 0
      const float weight = gpu::Exp2(state[0] - maximum);
      const auto* row = reinterpret_cast<const float*>(shared + w * Shape::kWarpBytes) +
                        column * Shape::kOutputRow;
      sum += weight * state[1];
      output += weight * row[channel];
    }
    const std::uint64_t slot =
        std::uint64_t{work.index} * params.max_columns + first_column + column;
    params.outputs[slot * Shape::kHeadDim + channel] = output;
    if (channel == 0) {
      params.states[slot * 2] = maximum;
      params.states[slot * 2 + 1] = sum;
    }
  }
}

// The kernel's body. blockIdx.y picks the columns.
template <ElementType kType, std::uint32_t kHeadDim, std::uint32_t kColumnTiles>
TESSERA_DEVICE void AttendMma(const AttendParams& params) {
  using Shape = MmaShape<kHeadDim, kColumnTiles>;
  const StepReader step(params.step);
  std::byte* shared = gpu::SharedMemory();
  const std::uint32_t works = CountWorks(params, step);
  const std::uint32_t first_column = gpu::BlockY() * Shape::kColumns;
  constexpr DenseTile kTile = {.head_dim = kHeadDim, .type = kType};
  for (std::uint32_t index = gpu::BlockX(); index < works; index += gpu::GridX()) {
    const Work work = LocateWork(params, step, index);
    const StepSequence& sequence = step.sequence(work.lane / step.layer(params.layer).kv_heads);
    PartTiles tiles;
    const bool found = tiles.Find(step.arena(), work.part, kTile.bytes());
    if (!found && gpu::Lane() == 0) Report(params, FaultKind::kBadTile, work);
    if (!work.part.sound && gpu::Thread() == 0) Report(params, FaultKind::kBadTail, work);
    if (sequence.queries * params.group > params.max_columns && gpu::Thread() == 0) {
      Report(params, FaultKind::kBadStep, work);
    }
    MmaState<Shape> state;
    BeginPart<Shape>(params, sequence, work, first_column, state);
    // Warps may disagree on `found`; none may miss the barriers below.
    AttendSlices<kType, Shape>(params, tiles, found ? work.part.entries : EntryRange{},
                               shared + gpu::Warp() * Shape::kWarpBytes, state);
    LeaveResult<kType, Shape>(state, shared);
    gpu::SyncBlock();
    StoreResult<Shape>(params, sequence, work, first_column, shared);
    gpu::SyncBlock();
  }
}

}  // namespace tessera::kernels::cuda
