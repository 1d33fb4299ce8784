// Code that the tensor-core kernels share: a warp's walk over its slices of 16 entries, the online
// softmax of a slice, and the reduction of a part's result across warps.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/cuda/common/fragment.h"
#include "kernels/cuda/common/gpu.cuh"
#include "kernels/cuda/common/work.cuh"

namespace tessera::kernels::cuda {

// One warp's online softmax over one part.
template <class Shape>
struct SoftmaxState {
  EntryRange visible[Shape::kColumnTiles][2];
  float maximum[Shape::kColumnTiles][2];
  float sum[Shape::kColumnTiles][2];  // sum over this thread's rows only, until the part ends
  float output[Shape::kColumnTiles][Shape::kSteps][4];
};

// One warp's registers for one part.
template <class Shape>
struct MmaState : SoftmaxState<Shape> {
  std::uint32_t query[Shape::kColumnTiles][Shape::kSteps][2];
};

template <class Shape>
TESSERA_DEVICE void ClearState(const AttendParams& params, const StepSequence& sequence,
                               const Work& work, std::uint32_t first_column,
                               SoftmaxState<Shape>& state) {
  TESSERA_UNROLL
  for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
    TESSERA_UNROLL
    for (std::uint32_t s = 0; s < Shape::kSteps; ++s) {
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < 4; ++i) state.output[t][s][i] = 0;
    }
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < 2; ++i) {
      state.visible[t][i] =
          VisibleToColumn(params, sequence, work.part,
                          first_column + t * kTileColumns + AccumulatorColumn(gpu::Lane(), i));
      state.maximum[t][i] = gpu::NegativeInfinity();
      state.sum[t][i] = 0;
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

// Weights are 2^(x - maximum + shift). The smallest fp16 is 2^-24. A shift of 15 keeps the sum of a
// long tail of small weights from being lost.
template <ElementType kType>
TESSERA_HOST_DEVICE constexpr float WeightShift() {
  return kType == ElementType::kFp16 ? 15.0f : 0.0f;
}

// One step of the online softmax for column tile t: turns logits into weights and rescales the
// accumulated output to the new maximum. Rescaling by one is skipped; it would not change any bit.
template <ElementType kType, class Shape>
TESSERA_DEVICE void AddLogits(std::uint32_t t, SoftmaxState<Shape>& state, float (&scores)[4]) {
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

// Converts weights from accumulator layout (row = entry) to B operand layout (k = entry) by two 8 x
// 8 transpositions.
template <ElementType kType>
TESSERA_DEVICE void TransposeWeights(const float (&scores)[4], std::uint32_t (&weights)[2]) {
  weights[0] = gpu::TransposeMatrix(gpu::PackPair<kType>(scores[0], scores[1]));
  weights[1] = gpu::TransposeMatrix(gpu::PackPair<kType>(scores[2], scores[3]));
}

// Starts copying the weights and positions of 16 rows, from `tile_row` on.
TESSERA_DEVICE void FetchWords(const std::byte* tile, std::uint32_t tile_row,
                               const TileWords& words, std::byte* shared) {
  static_assert(2 * kSliceEntries == kWarp);
  const bool of_positions = gpu::Lane() >= kSliceEntries;
  if (!(of_positions ? words.positions : words.weights)) return;
  const std::uint32_t row = tile_row + gpu::Lane() % kSliceEntries;
  gpu::CopyWord(shared + gpu::Lane() * 4,
                tile + (of_positions ? words.positions_at : words.weights_at) + row * 4);
}

// What a thread needs to know about the two rows of its accumulators.
struct RowFacts {
  bool live[2];
  std::uint32_t place[2];  // entry or position word that is compared with a column's visible range
  float bias[2];           // log2 of the weight
};

TESSERA_DEVICE RowFacts ReadFacts(EntryRange live, std::uint32_t entry, const TileWords& words,
                                  const std::byte* shared) {
  RowFacts facts;
  TESSERA_UNROLL
  for (std::uint32_t i = 0; i < 2; ++i) {
    const std::uint32_t row = AccumulatorRow(gpu::Lane(), i * 2);
    const auto* word = reinterpret_cast<const std::uint32_t*>(shared) + row;
    facts.live[i] = live.Contains(entry + row);
    facts.place[i] = words.positions ? word[kSliceEntries] : entry + row;
    facts.bias[i] = words.weights ? gpu::Log2(std::bit_cast<float>(*word)) : 0;
  }
  return facts;
}

// Turns scores into logits. Rows that column tile t does not see become -infinity.
template <class Shape>
TESSERA_DEVICE void MaskRows(const AttendParams& params, const RowFacts& facts, std::uint32_t t,
                             const SoftmaxState<Shape>& state, float (&scores)[4]) {
  TESSERA_UNROLL
  for (std::uint32_t i = 0; i < 4; ++i) {
    const bool seen = facts.live[i / 2] && state.visible[t][i % 2].Contains(facts.place[i / 2]);
    scores[i] = seen ? LogitOf(params, scores[i]) + facts.bias[i / 2] : gpu::NegativeInfinity();
  }
}

// A warp's ring of stages in shared memory. `ahead` (0 .. 3) slices are being copied while one is
// in use.
struct StageRing {
  std::byte* shared;
  std::uint32_t stage_bytes;
  std::uint32_t ahead;

  TESSERA_DEVICE std::byte* Stage(std::uint32_t index) const {
    // index % (ahead + 1) without a division.
    return shared + (ahead == 2 ? index % 3 : index & ahead) * stage_bytes;
  }
};

// Waits until at most `ahead` (0 .. kMost) of this thread's committed copy groups are in flight.
template <std::uint32_t kMost>
TESSERA_DEVICE void WaitForStage(std::uint32_t ahead) {
  if constexpr (kMost == 0) {
    gpu::WaitCopies<0>();
  } else if (ahead == kMost) {
    gpu::WaitCopies<kMost>();
  } else {
    WaitForStage<kMost - 1>(ahead);
  }
}

// Walks this warp's slices of `live`, kEntries each. fetch(entry, stage) starts the copies of a
// slice; attend(entry, stage) uses them. Requires ring.ahead <= kMost.
template <std::uint32_t kMost, std::uint32_t kStageEntries, std::uint32_t kEntries = kSliceEntries,
          class Fetch, class Attend>
TESSERA_DEVICE void WalkSlices(EntryRange live, const StageRing& ring, Fetch fetch, Attend attend) {
  const std::uint32_t first = live.begin / kStageEntries;
  const std::uint32_t last = live.empty() ? first : (live.end - 1) / kStageEntries + 1;
  const auto entry_of = [](std::uint32_t stage) {
    return stage * kStageEntries + gpu::Warp() * kEntries;
  };
  const auto start = [&](std::uint32_t stage) {
    if (stage < last && live.Meets(entry_of(stage), kEntries)) {
      fetch(entry_of(stage), ring.Stage(stage - first));
    }
    gpu::CommitCopies();
  };
  for (std::uint32_t i = 0; i < ring.ahead; ++i) start(first + i);
  for (std::uint32_t stage = first; stage < last; ++stage) {
    start(stage + ring.ahead);
    WaitForStage<kMost>(ring.ahead);
    gpu::SyncWarp();  // the copies of the other lanes have arrived too
    if (live.Meets(entry_of(stage), kEntries)) {
      attend(entry_of(stage), ring.Stage(stage - first));
    }
    gpu::SyncWarp();  // every lane is done with the stage that the next fetch overwrites
  }
  gpu::WaitCopies<0>();
}

// Stores this warp's result in shared memory: its output in its own stages, its softmax state after
// all stages. channel_of(step, i) is the channel of accumulator i of a step.
template <ElementType kType, class Shape, class ChannelOfAccumulator>
TESSERA_DEVICE void StoreWarpResult(const SoftmaxState<Shape>& state, std::byte* shared,
                                    ChannelOfAccumulator channel_of) {
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
        output[column * Shape::kOutputRow + channel_of(s, i)] = state.output[t][s][i];
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
      if (state[1] == 0) continue;  // the warp saw no entry; NaN compares unequal to 0
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

}  // namespace tessera::kernels::cuda
