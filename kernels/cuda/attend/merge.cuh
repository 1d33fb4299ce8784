// Merges the partial results of a lane's parts, in lane order, and writes output and log-sum-exp.
// One block of threads per (query head, query, sequence). Its threads form teams of one thread per
// channel, and the teams share the parts of a segment: parts are small and in far memory, so speed
// depends on how many loads are in flight.
//
// The sum of a packed segment's parts is in V's rotated space. It is rotated back once per segment,
// o = R_v^T o', before it is added to the others. Over planes the sum of weights times the mean
// mu_v is added, and neighbouring segments of one book are rotated back together. A segment with
// selection has as many parts as the device counted, in slots after the layer's other parts.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/gpu.cuh"
#include "kernels/cuda/common/lane_index.h"
#include "kernels/cuda/common/params.h"
#include "kernels/cuda/common/rotate.cuh"
#include "kernels/cuda/common/selection_index.h"
#include "kernels/cuda/common/step_view.h"
#include "kernels/cuda/common/work.cuh"

namespace tessera::kernels::cuda {

inline constexpr float kMergeLog2E = 1.44269504088896340736f;
inline constexpr float kMergeLn2 = 0.69314718055994530942f;

// Part of the definition of the result: each team adds up its own parts.
TESSERA_HOST_DEVICE constexpr std::uint32_t MergeTeams(std::uint32_t head_dim) {
  return head_dim == 256 ? 2 : 4;
}
TESSERA_HOST_DEVICE constexpr std::uint32_t MergeThreads(std::uint32_t head_dim) {
  return MergeTeams(head_dim) * head_dim;
}
// Shared memory: a row per team, and one value per warp.
TESSERA_HOST_DEVICE constexpr std::uint32_t MergeSharedBytes(std::uint32_t head_dim) {
  return (MergeTeams(head_dim) * head_dim + MergeThreads(head_dim) / kWarp) *
         static_cast<std::uint32_t>(sizeof(float));
}
// Parts, and rows of a rotation, that a thread loads at once.
inline constexpr std::uint32_t kMergeAhead = 8;

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
  float output = 0;    // this thread's channel, normalised
  float log2_sum = 0;  // -infinity: the neutral element
};

// The threads of a block as teams, with the shared memory through which they exchange data. All
// methods are block-collective.
class Teams {
 public:
  TESSERA_DEVICE explicit Teams(std::uint32_t head_dim)
      : head_dim_(head_dim),
        rows_(reinterpret_cast<float*>(gpu::SharedMemory())),
        found_(rows_ + MergeTeams(head_dim) * head_dim) {}

  TESSERA_DEVICE std::uint32_t count() const { return MergeTeams(head_dim_); }
  TESSERA_DEVICE std::uint32_t team() const { return gpu::Thread() / head_dim_; }
  TESSERA_DEVICE std::uint32_t channel() const { return gpu::Thread() % head_dim_; }

  TESSERA_DEVICE float Max(float value) {
    TESSERA_UNROLL
    for (std::uint32_t mask = 1; mask < kWarp; mask *= 2) {
      value = gpu::Max(value, gpu::ShuffleXor(value, mask));
    }
    if (gpu::Lane() == 0) found_[gpu::Warp()] = value;
    gpu::SyncBlock();
    for (std::uint32_t w = 0; w < gpu::Threads() / kWarp; ++w) value = gpu::Max(value, found_[w]);
    gpu::SyncBlock();
    return value;
  }
  // Returns the sum of the teams' values of this channel, added in team order, to all teams. The
  // values remain in Row until the next call.
  TESSERA_DEVICE float Sum(float value) {
    rows_[gpu::Thread()] = value;
    gpu::SyncBlock();
    float sum = 0;
    for (std::uint32_t t = 0; t < count(); ++t) sum += rows_[t * head_dim_ + channel()];
    gpu::SyncBlock();
    return sum;
  }
  // Makes `value` of each channel readable by all threads until the next Sum.
  TESSERA_DEVICE const float* Share(float value) {
    if (team() == 0) rows_[channel()] = value;
    gpu::SyncBlock();
    return rows_;
  }

 private:
  const std::uint32_t head_dim_;
  float* const rows_;   // [team][channel]
  float* const found_;  // one per warp
};

// Adds up parts in the order of the calls, relative to a maximum that is known in advance.
class PartSum {
 public:
  TESSERA_DEVICE PartSum(const AttendParams& params, Teams& teams, std::uint32_t column, float sink)
      : params_(params), teams_(teams), column_(column), sink_(sink), maximum_(sink) {}

  TESSERA_DEVICE void Raise(std::uint32_t first, std::uint32_t last) {
    for (std::uint32_t work = first + gpu::Thread(); work < last; work += gpu::Threads()) {
      maximum_ = gpu::Max(maximum_, StateOf(work)[0]);
    }
  }
  // Must follow the last Raise.
  TESSERA_DEVICE void AddSink() {
    maximum_ = teams_.Max(maximum_);
    if (sink_ > gpu::NegativeInfinity() && teams_.team() == 0) sum_ = gpu::Exp2(sink_ - maximum_);
  }
  // Adds this thread's team's share of the parts to `output`, in whichever space that is. Teams
  // take parts in turn, counted from `lane_first`, so it does not matter how the parts are divided
  // into calls.
  TESSERA_DEVICE void Add(std::uint32_t lane_first, std::uint32_t first, std::uint32_t last,
                          float& output) {
    const std::uint32_t turn = (first - lane_first) % teams_.count();
    const std::uint32_t wait = (teams_.team() + teams_.count() - turn) % teams_.count();
    for (std::uint32_t work = first + wait; work < last; work += teams_.count() * kMergeAhead) {
      float maximum[kMergeAhead];
      float sum[kMergeAhead];
      float row[kMergeAhead];
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < kMergeAhead; ++i) {
        const std::uint32_t part = work + i * teams_.count();
        const bool live = part < last;
        const float* state = StateOf(live ? part : work);
        maximum[i] = state[0];
        sum[i] = live ? state[1] : 0;
        row[i] = OutputOf(live ? part : work)[teams_.channel()];
      }
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < kMergeAhead; ++i) {
        if (sum[i] == 0) continue;  // the part saw no entry; NaN compares unequal to 0
        const float weight = gpu::Exp2(maximum[i] - maximum_);
        sum_ += weight * sum[i];
        output += weight * row[i];
      }
    }
  }
  // The weights that this thread's team added so far.
  TESSERA_DEVICE float weights() const { return sum_; }
  // `output` is the total of the channel.
  TESSERA_DEVICE Merged Finish(float output) const {
    const float sum = teams_.Sum(sum_);
    if (sum == 0) return {.output = 0, .log2_sum = gpu::NegativeInfinity()};
    return {.output = output / sum, .log2_sum = maximum_ + gpu::Log2(sum)};
  }

 private:
  TESSERA_DEVICE const float* StateOf(std::uint32_t work) const {
    return params_.states + (std::uint64_t{work} * params_.max_columns + column_) * 2;
  }
  TESSERA_DEVICE const float* OutputOf(std::uint32_t work) const {
    return params_.outputs +
           (std::uint64_t{work} * params_.max_columns + column_) * params_.head_dim;
  }
  const AttendParams& params_;
  Teams& teams_;
  const std::uint32_t column_;
  const float sink_;
  float maximum_;
  float sum_ = 0;  // over the team's parts
};

// Returns this thread's share of its channel of R^T y, over the rows of R that its team takes.
// `element` is the team's share of y.
TESSERA_DEVICE float Unrotate(const AttendParams& params, const StepStrategy& strategy,
                              const std::byte* rotation, Teams& teams, float element) {
  const float* y = teams.Share(teams.Sum(element));
  const std::uint32_t channels = strategy.shape.value.channels;
  float sum = 0;
  for (std::uint32_t c = teams.team(); c < channels; c += teams.count() * kMergeAhead) {
    float weight[kMergeAhead];
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < kMergeAhead; ++i) {
      const std::uint32_t row = c + i * teams.count();
      weight[i] =
          LoadElement(rotation, (row < channels ? row : c) * params.head_dim + teams.channel(),
                      strategy.rotation_type);
    }
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < kMergeAhead; ++i) {
      const std::uint32_t row = c + i * teams.count();
      if (row < channels) sum += y[row] * weight[i];
    }
  }
  gpu::SyncBlock();  // before the next segment's row
  return sum;
}

// The parts of a lane's selected blocks; none if the lane reads everything.
struct SelectedParts {
  std::uint32_t first = 0;  // index among the partial results
  std::uint32_t count = 0;
  const SelectedRange* ranges = nullptr;  // ranges of its choices
};

TESSERA_DEVICE SelectedParts FindSelectedParts(const AttendParams& params, const StepReader& step,
                                               const StepLane& lane) {
  if (lane.selection == kReadWhole) return {};
  const StepSelection& selection = step.selection(params.layer, lane.selection);
  const SelectedRange* ranges = params.ranges + FirstRangeOf(selection, lane.selection);
  return {.first = params.max_works + step.slots(params.layer)[lane.selection],
          .count = ranges[selection.choices].first_part,
          .ranges = ranges};
}

// Whether a segment of planes has the book of the one before it.
TESSERA_DEVICE bool SharesBook(const AttendParams& params, const StepReader& step,
                               const StepStrategy& before, const StepSegment& segment) {
  if (!before.shape.planes() || segment.strategy == kPlainSegment) return false;
  const StepStrategy& strategy = step.strategy(params.layer, segment.strategy);
  return strategy.shape.planes() && strategy.value_rotation == before.value_rotation &&
         strategy.value_mean == before.value_mean;
}

// Adds up a lane with packed segments: its segments, then its tail. Returns this thread's team's
// share. Block-collective.
TESSERA_DEVICE float AddLane(const AttendParams& params, const StepReader& step,
                             const StepLane& lane, const SelectedParts& selected,
                             std::uint32_t first, std::uint32_t last, Teams& teams, PartSum& sum) {
  const StepSegment* segments = step.segments(lane);
  float output = 0;
  float rotated = 0;  // in the space of the book that the last segments share
  float weights = 0;  // theirs
  for (std::uint32_t s = 0; s < lane.segment_count; ++s) {
    std::uint32_t lane_first = first;
    std::uint32_t begin = first + segments[s].first_part;
    std::uint32_t end = begin + PartsOf(segments[s].entries);
    if (const std::uint32_t choice = segments[s].choice; choice != kReadWhole) {
      lane_first = selected.first;
      begin = selected.first + selected.ranges[choice].first_part;
      end = selected.first + selected.ranges[choice + 1].first_part;
    }
    const std::uint32_t index = segments[s].strategy;
    if (index == kPlainSegment || !step.strategy(params.layer, index).shape.packed()) {
      sum.Add(lane_first, begin, end, output);
      continue;
    }
    const StepStrategy& strategy = step.strategy(params.layer, index);
    Rotations rotations;
    // The rotate kernel has reported the fault.
    if (!rotations.Find(step.arena(), strategy) || strategy.shape.head_dim != params.head_dim) {
      continue;
    }
    weights -= sum.weights();
    sum.Add(lane_first, begin, end, rotated);
    weights += sum.weights();
    if (s + 1 < lane.segment_count && SharesBook(params, step, strategy, segments[s + 1])) continue;
    output += rotations.value == nullptr
                  ? rotated
                  : Unrotate(params, strategy, rotations.value, teams, rotated);
    if (rotations.value_mean != nullptr) {
      output += weights * LoadElement(rotations.value_mean, teams.channel(), ElementType::kBf16);
    }
    rotated = weights = 0;
  }
  sum.Add(first, first + lane.segment_parts, last, output);
  return output;
}

// Merges the lane's parts for column `column`, and adds the head's sink once.
TESSERA_DEVICE Merged MergeLane(const AttendParams& params, const StepReader& step,
                                std::uint32_t lane, std::uint32_t column, float sink) {
  const std::uint32_t first = step.works(params.layer)[lane];
  const std::uint32_t last = step.works(params.layer)[lane + 1];
  Teams teams(params.head_dim);
  PartSum sum(params, teams, column, sink);
  sum.Raise(first, last);
  float output = 0;
  if (step.layer(params.layer).strategies == 0) {
    sum.AddSink();
    sum.Add(first, first, last, output);
  } else {
    const StepLane& of_lane = step.lane(params.layer, lane);
    const SelectedParts selected = FindSelectedParts(params, step, of_lane);
    sum.Raise(selected.first, selected.first + selected.count);
    sum.AddSink();
    output = AddLane(params, step, of_lane, selected, first, last, teams, sum);
  }
  return sum.Finish(teams.Sum(output));
}

TESSERA_DEVICE void Merge(const AttendParams& params) {
  const StepReader step(params.step);
  const std::uint32_t head = gpu::BlockX();
  const std::uint32_t query = gpu::BlockY();
  const std::uint32_t index = gpu::BlockZ();
  // The attention kernel reports it.
  if (!Serves(params, step) || index >= step.header().batch) return;
  const StepSequence& sequence = step.sequence(index);
  if (query >= sequence.queries) return;
  const std::uint32_t lane = index * step.layer(params.layer).kv_heads + head / params.group;
  const float sink =
      params.sinks == nullptr ? gpu::NegativeInfinity() : params.sinks[head] * kMergeLog2E;
  const Merged merged =
      MergeLane(params, step, lane, query * params.group + head % params.group, sink);
  if (gpu::Thread() >= params.head_dim) return;
  const std::uint64_t row = sequence.first_query_row + std::uint64_t{query};
  StoreOutput(params,
              row * params.output_stride + std::uint64_t{head} * params.head_dim + gpu::Thread(),
              merged.output);
  if (params.lse != nullptr && gpu::Thread() == 0) {
    params.lse[row * params.query_heads + head] = merged.log2_sum * kMergeLn2;
  }
}

}  // namespace tessera::kernels::cuda
