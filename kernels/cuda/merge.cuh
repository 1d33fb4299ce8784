// Merges the partial results of a lane's parts, in lane order, and writes output and log-sum-exp.
// One block per (query head, query, sequence), one thread per channel.
//
// What a packed segment's parts add up to is in V's space. It leaves it once per segment, o = R_v^T
// o', before it is added to the others. A segment that was selected from has as many parts as the
// device found that it takes, in slots behind the layer's other parts.
#pragma once

#include <cstdint>

#include "kernels/cuda/gpu.cuh"
#include "kernels/cuda/lane_index.h"
#include "kernels/cuda/params.h"
#include "kernels/cuda/rotate.cuh"
#include "kernels/cuda/selection_index.h"
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

// Adds parts up in the order in which it is given them, relative to a maximum known before.
class PartSum {
 public:
  TESSERA_DEVICE PartSum(const AttendParams& params, std::uint32_t column, float sink)
      : params_(params), column_(column), sink_(sink), maximum_(sink) {}

  TESSERA_DEVICE void Raise(std::uint32_t first, std::uint32_t last) {
    for (std::uint32_t work = first; work < last; ++work) {
      maximum_ = gpu::Max(maximum_, StateOf(work)[0]);
    }
  }
  // After the last Raise.
  TESSERA_DEVICE void AddSink() {
    if (sink_ > gpu::NegativeInfinity()) sum_ = gpu::Exp2(sink_ - maximum_);
  }
  // Adds to `output`, whichever space that is in.
  TESSERA_DEVICE void Add(std::uint32_t first, std::uint32_t last, float& output) {
    for (std::uint32_t work = first; work < last; ++work) {
      const float* state = StateOf(work);
      if (state[1] == 0) continue;  // saw nothing; a NaN is not 0
      const float weight = gpu::Exp2(state[0] - maximum_);
      const std::uint64_t slot = std::uint64_t{work} * params_.max_columns + column_;
      sum_ += weight * state[1];
      output += weight * params_.outputs[slot * params_.head_dim + gpu::Thread()];
    }
  }
  TESSERA_DEVICE Merged Finish(float output) const {
    if (sum_ == 0) return {.output = 0, .log2_sum = gpu::NegativeInfinity()};
    return {.output = output / sum_, .log2_sum = maximum_ + gpu::Log2(sum_)};
  }

 private:
  TESSERA_DEVICE const float* StateOf(std::uint32_t work) const {
    return params_.states + (std::uint64_t{work} * params_.max_columns + column_) * 2;
  }
  const AttendParams& params_;
  const std::uint32_t column_;
  const float sink_;
  float maximum_;
  float sum_ = 0;
};

// This thread's channel of R^T y, where each thread holds its element of y. The whole block.
TESSERA_DEVICE float Unrotate(const AttendParams& params, const StepStrategy& strategy,
                              const std::byte* rotation, float element) {
  auto* row = reinterpret_cast<float*>(gpu::SharedMemory());
  row[gpu::Thread()] = element;
  gpu::SyncBlock();
  float sum = 0;
  for (std::uint32_t c = 0; c < strategy.shape.value.channels; ++c) {
    sum +=
        row[c] * LoadElement(rotation, c * params.head_dim + gpu::Thread(), strategy.rotation_type);
  }
  gpu::SyncBlock();  // before the next segment's row comes
  return sum;
}

// The parts of what a lane took; none where it reads everything.
struct PartsTaken {
  std::uint32_t first = 0;  // among the partial results
  std::uint32_t count = 0;
  const TakenRange* ranges = nullptr;  // of its choices
};

TESSERA_DEVICE PartsTaken FindTaken(const AttendParams& params, const StepReader& step,
                                    const StepLane& lane) {
  if (lane.selection == kReadWhole) return {};
  const StepSelection& selection = step.selection(params.layer, lane.selection);
  const TakenRange* ranges = params.ranges + FirstRangeOf(selection, lane.selection);
  return {.first = params.max_works + step.slots(params.layer)[lane.selection],
          .count = ranges[selection.choices].first_part,
          .ranges = ranges};
}

// The segments of a lane, of which some are packed, then its tail. The whole block.
TESSERA_DEVICE float AddLane(const AttendParams& params, const StepReader& step,
                             const StepLane& lane, const PartsTaken& selected, std::uint32_t first,
                             std::uint32_t last, PartSum& sum) {
  const StepSegment* segments = step.segments(lane);
  float output = 0;
  for (std::uint32_t s = 0; s < lane.segment_count; ++s) {
    std::uint32_t begin = first + segments[s].first_part;
    std::uint32_t end = begin + PartsOf(segments[s].entries);
    if (const std::uint32_t choice = segments[s].choice; choice != kReadWhole) {
      begin = selected.first + selected.ranges[choice].first_part;
      end = selected.first + selected.ranges[choice + 1].first_part;
    }
    const std::uint32_t index = segments[s].strategy;
    if (index == kPlainSegment || !step.strategy(params.layer, index).shape.packed()) {
      sum.Add(begin, end, output);
      continue;
    }
    const StepStrategy& strategy = step.strategy(params.layer, index);
    Rotations rotations;
    // Reported where the queries were rotated.
    if (!rotations.Find(step.arena(), strategy) || strategy.shape.head_dim != params.head_dim) {
      continue;
    }
    float rotated = 0;
    sum.Add(begin, end, rotated);
    output +=
        rotations.value == nullptr ? rotated : Unrotate(params, strategy, rotations.value, rotated);
  }
  sum.Add(first + lane.segment_parts, last, output);
  return output;
}

// The lane's parts [first, last) for column `column`, and the head's sink, once.
TESSERA_DEVICE Merged MergeLane(const AttendParams& params, const StepReader& step,
                                std::uint32_t lane, std::uint32_t column, float sink) {
  const std::uint32_t first = step.works(params.layer)[lane];
  const std::uint32_t last = step.works(params.layer)[lane + 1];
  PartSum sum(params, column, sink);
  sum.Raise(first, last);
  float output = 0;
  if (step.layer(params.layer).strategies == 0) {
    sum.AddSink();
    sum.Add(first, last, output);
  } else {
    const StepLane& of_lane = step.lane(params.layer, lane);
    const PartsTaken selected = FindTaken(params, step, of_lane);
    sum.Raise(selected.first, selected.first + selected.count);
    sum.AddSink();
    output = AddLane(params, step, of_lane, selected, first, last, sum);
  }
  return sum.Finish(output);
}

// Shared memory: head_dim floats.
TESSERA_DEVICE void Merge(const AttendParams& params) {
  const StepReader step(params.step);
  const std::uint32_t head = gpu::BlockX();
  const std::uint32_t query = gpu::BlockY();
  const std::uint32_t index = gpu::BlockZ();
  if (!Serves(params, step) || index >= step.header().batch) return;  // reported by the attention
  const StepSequence& sequence = step.sequence(index);
  if (query >= sequence.queries) return;
  const std::uint32_t lane = index * step.layer(params.layer).kv_heads + head / params.group;
  const float sink =
      params.sinks == nullptr ? gpu::NegativeInfinity() : params.sinks[head] * kMergeLog2E;
  const Merged merged =
      MergeLane(params, step, lane, query * params.group + head % params.group, sink);
  const std::uint64_t row = sequence.first_query_row + std::uint64_t{query};
  StoreOutput(params,
              row * params.output_stride + std::uint64_t{head} * params.head_dim + gpu::Thread(),
              merged.output);
  if (params.lse != nullptr && gpu::Thread() == 0) {
    params.lse[row * params.query_heads + head] = merged.log2_sum * kMergeLn2;
  }
}

}  // namespace tessera::kernels::cuda
