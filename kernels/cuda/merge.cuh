// Merges the partial results of a lane's parts, in lane order, and writes output and log-sum-exp.
// One block per (query head, query, sequence), one thread per channel.
#pragma once

#include <cstdint>

#include "kernels/cuda/gpu.cuh"
#include "kernels/cuda/lane_index.h"
#include "kernels/cuda/params.h"
#include "kernels/cuda/step_view.h"
#include "kernels/cuda/work.cuh"

namespace tessera::kernels::cuda {

inline constexpr float kMergeLog2E = 1.44269504088896340736f;
inline constexpr float kMergeLn2 = 0.69314718055994530942f;

TESSERA_DEVICE void StoreOutput(const AttendParams& params, std::uint64_t index, float value) {
  switch (params.output_type) {
    case ElementType::kFp32:
      reinterpret_cast<float*>(params.output)[index] = value;
      return;
    case ElementType::kBf16:
      reinterpret_cast<std::uint16_t*>(params.output)[index] =
          static_cast<std::uint16_t>(gpu::PackPair<ElementType::kBf16>(value, 0));
      return;
    case ElementType::kFp16:
      reinterpret_cast<std::uint16_t*>(params.output)[index] =
          static_cast<std::uint16_t>(gpu::PackPair<ElementType::kFp16>(value, 0));
      return;
  }
}

struct Merged {
  float output = 0;    // of this thread's channel, normalised
  float log2_sum = 0;  // -infinity: the neutral element
};

// Parts [first, last) of column `column`, and the head's sink, once.
TESSERA_DEVICE Merged MergeParts(const AttendParams& params, std::uint32_t first,
                                 std::uint32_t last, std::uint32_t column, float sink) {
  const auto state_of = [&](std::uint32_t work) {
    return params.states + (std::uint64_t{work} * params.max_columns + column) * 2;
  };
  float maximum = sink;
  for (std::uint32_t work = first; work < last; ++work) {
    maximum = gpu::Max(maximum, state_of(work)[0]);
  }
  float sum = sink > gpu::NegativeInfinity() ? gpu::Exp2(sink - maximum) : 0;
  float output = 0;
  for (std::uint32_t work = first; work < last; ++work) {
    const float* state = state_of(work);
    if (state[1] == 0) continue;  // saw nothing; a NaN is not 0
    const float weight = gpu::Exp2(state[0] - maximum);
    const std::uint64_t slot = std::uint64_t{work} * params.max_columns + column;
    sum += weight * state[1];
    output += weight * params.outputs[slot * params.head_dim + gpu::Thread()];
  }
  if (sum == 0) return {.output = 0, .log2_sum = gpu::NegativeInfinity()};
  return {.output = output / sum, .log2_sum = maximum + gpu::Log2(sum)};
}

TESSERA_DEVICE void Merge(const AttendParams& params) {
  const StepReader step(params.step);
  const std::uint32_t head = gpu::BlockX();
  const std::uint32_t query = gpu::BlockY();
  const std::uint32_t index = gpu::BlockZ();
  if (!Serves(params, step) || index >= step.header().batch) return;  // reported by the attention
  const StepSequence& sequence = step.sequence(index);
  if (query >= sequence.queries) return;
  const std::uint32_t* works = step.works(params.layer);
  const std::uint32_t lane = index * step.layer(params.layer).kv_heads + head / params.group;
  const float sink =
      params.sinks == nullptr ? gpu::NegativeInfinity() : params.sinks[head] * kMergeLog2E;
  const Merged merged = MergeParts(params, works[lane], works[lane + 1],
                                   query * params.group + head % params.group, sink);
  const std::uint64_t row = sequence.first_query_row + std::uint64_t{query};
  StoreOutput(params,
              row * params.output_stride + std::uint64_t{head} * params.head_dim + gpu::Thread(),
              merged.output);
  if (params.lse != nullptr && gpu::Thread() == 0) {
    params.lse[row * params.query_heads + head] = merged.log2_sum * kMergeLn2;
  }
}

}  // namespace tessera::kernels::cuda
