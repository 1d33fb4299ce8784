// Selects the blocks of a lane. One block of threads handles one lane.
//
//   row sums    by share: log-sum-exp of each query row, from the sums of the pieces
//   values      of a block: the largest score over the rows, less the row's sum (by share)
//   threshold   the value at which the budget is met: four radix passes of 8 bits over a histogram
//               of entries
//   taken       blocks above the threshold, the lowest-numbered ones at it until the budget is met,
//               and the forced ones, as an ordered list. The list is then cut into parts
//
// In the last step each thread handles a range of neighbouring blocks, so counts are scanned over
// threads only once.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/gpu.cuh"
#include "kernels/cuda/common/selection_index.h"
#include "kernels/cuda/common/work.cuh"
#include "kernels/cuda/select/score.cuh"

namespace tessera::kernels::cuda {

inline constexpr std::uint32_t kSelectWarps = kSelectThreads / kWarp;
inline constexpr std::uint32_t kHistogramBins = 256;
// Shared memory in words: histogram, totals of the warps, the broadcast values of FindBin.
inline constexpr std::uint32_t kSelectSharedBytes = (kHistogramBins + kSelectWarps + 2) * 4;

struct SelectShared {
  std::uint32_t* histogram;
  std::uint32_t* warps;
  std::uint32_t* told;  // broadcast by FindBin: digit, entries still wanted

  TESSERA_DEVICE SelectShared()
      : histogram(reinterpret_cast<std::uint32_t*>(gpu::SharedMemory())),
        warps(histogram + kHistogramBins),
        told(warps + kSelectWarps) {}
};

// One lane's selection, as its block of threads sees it.
struct SelectLane {
  std::uint32_t index;  // index among the layer's selections
  std::uint32_t columns;
  std::uint32_t blocks;
  ForcedBlocks forced;
  const float* scores;    // at the lane's first block
  std::uint32_t* values;  // at the lane's first block
  std::uint8_t* visible;  // at the lane's first block
  std::uint32_t* taken;   // at the lane's first block
};

// Blocks that a thread loads at once, to hide the latency of global memory.
inline constexpr std::uint32_t kSelectAhead = 8;

// Calls act(block, its visible entries, its key) for `begin`, begin + stride, ... below `end`, in
// order.
template <class Act>
TESSERA_DEVICE void ForEachBlock(const SelectLane& lane, std::uint32_t begin, std::uint32_t end,
                                 std::uint32_t stride, Act act) {
  for (std::uint32_t first = begin; first < end; first += kSelectAhead * stride) {
    std::uint32_t entries[kSelectAhead];
    std::uint32_t keys[kSelectAhead];
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < kSelectAhead; ++i) {
      const std::uint32_t b = first + i * stride < end ? first + i * stride : first;
      entries[i] = lane.visible[b];
      keys[i] = lane.values[b];
    }
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < kSelectAhead; ++i) {
      if (first + i * stride < end) act(first + i * stride, entries[i], keys[i]);
    }
  }
}

// Inclusive prefix sum of `value` over the lanes of the warp.
TESSERA_DEVICE std::uint32_t SumUpToLane(std::uint32_t value) {
  TESSERA_UNROLL
  for (std::uint32_t step = 1; step < kWarp; step *= 2) {
    const std::uint32_t from = gpu::Lane() >= step ? gpu::Lane() - step : 0;
    const auto other = static_cast<std::uint32_t>(gpu::Shuffle(value, from));
    if (gpu::Lane() >= step) value += other;
  }
  return value;
}

struct BlockSum {
  std::uint32_t before;  // sum over the threads before this one
  std::uint32_t all;
};

// Block-collective.
TESSERA_DEVICE BlockSum SumOverBlock(std::uint32_t value, const SelectShared& shared) {
  const std::uint32_t up_to = SumUpToLane(value);
  if (gpu::Lane() == kWarp - 1) shared.warps[gpu::Warp()] = up_to;
  gpu::SyncBlock();
  BlockSum sum = {.before = up_to - value, .all = 0};
  for (std::uint32_t w = 0; w < kSelectWarps; ++w) {
    if (w < gpu::Warp()) sum.before += shared.warps[w];
    sum.all += shared.warps[w];
  }
  gpu::SyncBlock();  // before the next sum
  return sum;
}

// Computes the row sums, one warp per row, and stores them for LaneValues.
TESSERA_DEVICE void SumRows(const AttendParams& params, const StepReader& step,
                            const SelectLane& lane) {
  const std::uint32_t* pieces = step.pieces(params.layer);
  const std::uint32_t first = pieces[lane.index];
  const std::uint32_t last = pieces[lane.index + 1];
  for (std::uint32_t column = gpu::Warp(); column < lane.columns; column += kSelectWarps) {
    LogSum all;
    for (std::uint32_t piece = first + gpu::Lane(); piece < last; piece += kWarp) {
      const float* of_piece =
          params.score_sums + (std::uint64_t{piece} * params.max_columns + column) * 2;
      all.Add(of_piece[0], of_piece[1]);
    }
    TESSERA_UNROLL
    for (std::uint32_t mask = 1; mask < kWarp; mask *= 2) {
      const float maximum = gpu::ShuffleXor(all.maximum, mask);
      const float sum = gpu::ShuffleXor(all.sum, mask);
      all.Add(maximum, sum);
    }
    if (gpu::Lane() == 0) {
      params.row_sums[std::uint64_t{lane.index} * params.max_columns + column] = all.Log2();
    }
  }
}

struct Visible {
  std::uint32_t entries = 0;
  std::uint32_t forced = 0;  // entries of forced blocks among these
};

// Computes every block's value. Returns this thread's share of the visible entries.
TESSERA_DEVICE Visible LaneValues(const AttendParams& params, const SelectLane& lane,
                                  bool by_share) {
  const float* sums = params.row_sums + std::uint64_t{lane.index} * params.max_columns;
  Visible visible;
  for (std::uint32_t first = gpu::Thread(); first < lane.blocks;
       first += kSelectAhead * kSelectThreads) {
    float values[kSelectAhead];
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < kSelectAhead; ++i) values[i] = gpu::NegativeInfinity();
    for (std::uint32_t c = 0; c < lane.columns; ++c) {
      const float sum = by_share ? sums[c] : 0;
      float scores[kSelectAhead];
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < kSelectAhead; ++i) {
        const std::uint32_t b = first + i * kSelectThreads;
        scores[i] =
            lane.scores[std::uint64_t{c} * params.max_blocks + (b < lane.blocks ? b : first)];
      }
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < kSelectAhead; ++i) {
        values[i] = gpu::Max(values[i], scores[i] - sum);
      }
    }
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < kSelectAhead; ++i) {
      const std::uint32_t b = first + i * kSelectThreads;
      if (b >= lane.blocks) continue;
      lane.values[b] = OrderedKey(values[i]);
      const std::uint32_t entries = lane.visible[b];
      visible.entries += entries;
      if (lane.forced.Has(b)) visible.forced += entries;
    }
  }
  return visible;
}

// Blocks above `key` are selected. Of the blocks at `key`, the first are selected until `wanted`
// entries are covered.
struct Threshold {
  std::uint32_t key = 0;
  std::uint32_t wanted = 0;
};

// Finds the bin in which the sum from the highest bin downwards reaches `wanted`. Called by one
// warp.
TESSERA_DEVICE void FindBin(const SelectShared& shared, std::uint32_t wanted) {
  constexpr std::uint32_t kPer = kHistogramBins / kWarp;
  const std::uint32_t highest = kHistogramBins - 1 - gpu::Lane() * kPer;
  std::uint32_t own = 0;
  TESSERA_UNROLL
  for (std::uint32_t i = 0; i < kPer; ++i) own += shared.histogram[highest - i];
  std::uint32_t above = SumUpToLane(own) - own;
  TESSERA_UNROLL
  for (std::uint32_t i = 0; i < kPer; ++i) {
    const std::uint32_t here = shared.histogram[highest - i];
    if (above < wanted && wanted - above <= here) {
      shared.told[0] = highest - i;
      shared.told[1] = wanted - above;
    }
    above += here;
  }
}

// Requires `wanted` > 0. Block-collective.
TESSERA_DEVICE Threshold FindThreshold(const SelectLane& lane, const SelectShared& shared,
                                       std::uint32_t wanted) {
  Threshold threshold = {.key = 0, .wanted = wanted};
  for (std::uint32_t shift = 32; shift > 0;) {
    const std::uint32_t known = shift == 32 ? 0 : ~0u << shift;
    shift -= 8;
    for (std::uint32_t i = gpu::Thread(); i < kHistogramBins; i += kSelectThreads) {
      shared.histogram[i] = 0;
    }
    if (gpu::Thread() == 0) {  // kept if there are fewer entries than wanted
      shared.told[0] = 0;
      shared.told[1] = threshold.wanted;
    }
    gpu::SyncBlock();
    ForEachBlock(lane, gpu::Thread(), lane.blocks, kSelectThreads,
                 [&](std::uint32_t b, std::uint32_t entries, std::uint32_t key) {
                   if (entries == 0 || lane.forced.Has(b) || (key & known) != threshold.key) return;
                   gpu::AtomicAdd(shared.histogram + (key >> shift & (kHistogramBins - 1)),
                                  entries);
                 });
    gpu::SyncBlock();
    if (gpu::Warp() == 0) FindBin(shared, threshold.wanted);
    gpu::SyncBlock();
    threshold.key |= shared.told[0] << shift;
    threshold.wanted = shared.told[1];
    gpu::SyncBlock();  // before the next digit
  }
  return threshold;
}

// Decides block by block which of a thread's range are selected. `ties`: entries at the threshold
// before the range.
class SelectionWalk {
 public:
  TESSERA_DEVICE SelectionWalk(const SelectLane& lane, const Threshold& threshold,
                               std::uint32_t ties)
      : lane_(lane), threshold_(threshold), ties_(ties) {}

  // Must be called with neighbouring blocks in order.
  TESSERA_DEVICE bool Takes(std::uint32_t block, std::uint32_t entries, std::uint32_t key) {
    if (entries == 0) return false;
    if (lane_.forced.Has(block)) return true;
    if (threshold_.wanted == 0 || key < threshold_.key) return false;
    if (key > threshold_.key) return true;
    const bool takes = ties_ < threshold_.wanted;
    ties_ += entries;
    return takes;
  }
  TESSERA_DEVICE std::uint32_t ties() const { return ties_; }

 private:
  const SelectLane& lane_;
  const Threshold threshold_;
  std::uint32_t ties_;
};

// Writes the list, and where each choice begins in it. Returns its length. Block-collective.
TESSERA_DEVICE std::uint32_t ListSelected(const SelectLane& lane, const SelectShared& shared,
                                          const Threshold& threshold, const StepChoice* choices,
                                          std::uint32_t choice_count, SelectedRange* ranges) {
  const std::uint32_t blocks = lane.blocks;
  const std::uint32_t per = (blocks + kSelectThreads - 1) / kSelectThreads;
  const std::uint32_t begin = gpu::Thread() * per < blocks ? gpu::Thread() * per : blocks;
  const std::uint32_t end = blocks - begin > per ? begin + per : blocks;
  SelectionWalk tied(lane, threshold, 0);
  ForEachBlock(lane, begin, end, 1, [&](std::uint32_t b, std::uint32_t entries, std::uint32_t key) {
    (void)tied.Takes(b, entries, key);
  });
  const std::uint32_t ties = SumOverBlock(tied.ties(), shared).before;
  std::uint32_t count = 0;
  SelectionWalk counted(lane, threshold, ties);
  ForEachBlock(lane, begin, end, 1, [&](std::uint32_t b, std::uint32_t entries, std::uint32_t key) {
    count += counted.Takes(b, entries, key) ? 1 : 0;
  });
  const BlockSum sum = SumOverBlock(count, shared);
  std::uint32_t place = sum.before;
  if (begin == end) return sum.all;
  SelectionWalk listed(lane, threshold, ties);
  std::uint32_t choice = ChoiceOfBlock(choices, choice_count, begin);
  std::uint32_t choice_begin = choices[choice].first_block;
  std::uint32_t next = choice + 1 < choice_count ? choices[choice + 1].first_block : blocks;
  ForEachBlock(lane, begin, end, 1, [&](std::uint32_t b, std::uint32_t entries, std::uint32_t key) {
    if (b == next) {
      ++choice;
      choice_begin = next;
      next = choice + 1 < choice_count ? choices[choice + 1].first_block : blocks;
    }
    if (choice_begin == b) ranges[choice].first_taken = place;
    if (listed.Takes(b, entries, key)) lane.taken[place++] = b - choice_begin;
  });
  return sum.all;
}

// Cuts the ranges into parts. Returns false if they need more parts than the lane has slots.
TESSERA_DEVICE bool CutParts(const AttendParams& params, const StepReader& step,
                             const StepSelection& selection, std::uint32_t index,
                             std::uint32_t taken, SelectedRange* ranges) {
  const StepLane& step_lane = step.lane(params.layer, selection.lane);
  const StepChoice* choices = step.choices(params.layer) + selection.first_choice;
  const std::uint32_t* counts = step.slots(params.layer) + index;
  const std::uint32_t slots = counts[1] - counts[0];
  std::uint32_t parts = 0;
  bool fits = true;
  ranges[selection.choices].first_taken = taken;
  for (std::uint32_t c = 0; c < selection.choices; ++c) {
    const StepSegment& segment = step.segments(step_lane)[choices[c].segment];
    const std::uint32_t block = step.strategy(params.layer, segment.strategy).shape.block;
    ranges[c].first_part = parts;
    parts += SelectedPartsOf(ranges[c + 1].first_taken - ranges[c].first_taken, block);
    fits = fits && parts <= slots;
    parts = parts < slots ? parts : slots;
  }
  ranges[selection.choices].first_part = parts;
  return fits;
}

// Number of rows of the lane's tail that the queries see.
TESSERA_DEVICE std::uint32_t VisibleTailRows(const AttendParams& params, const StepReader& step,
                                             const StepSelection& selection) {
  const StepSequence& sequence = step.sequence(selection.lane / step.layer(params.layer).kv_heads);
  const Positions visible = VisibleFromAll(sequence.first_query_position, sequence.queries,
                                           {.causal = params.causal != 0, .window = params.window});
  const EntryRange seen =
      LocateTail(step.lane(params.layer, selection.lane), sequence, visible).entries;
  return seen.end - seen.begin;
}

// Number of visible rows of its last segment that are in no block yet.
TESSERA_DEVICE std::uint32_t VisibleUnblockedRows(const AttendParams& params,
                                                  const StepReader& step,
                                                  const StepSelection& selection) {
  if (selection.unblocked == 0) return 0;
  const StepLane& lane = step.lane(params.layer, selection.lane);
  const StepSequence& sequence = step.sequence(selection.lane / step.layer(params.layer).kv_heads);
  const StepSegment& last = step.segments(lane)[lane.segment_count - 1];
  const Positions visible = VisibleFromAll(sequence.first_query_position, sequence.queries,
                                           {.causal = params.causal != 0, .window = params.window});
  const std::uint64_t end = last.first_position + last.entries;
  const std::uint64_t first = end - selection.unblocked;
  const std::uint64_t from = first > visible.begin ? first : visible.begin;
  const std::uint64_t to = end < visible.end ? end : visible.end;
  return to > from ? static_cast<std::uint32_t>(to - from) : 0;
}

// Kernel body. Grid: the layer's selections.
TESSERA_DEVICE void SelectBlocks(const AttendParams& params) {
  const StepReader step(params.step);
  if (!ServesOrReports(params, step)) return;
  const StepLayer& layer = step.layer(params.layer);
  if (gpu::BlockX() >= layer.selections) return;
  const StepSelection& selection = step.selection(params.layer, gpu::BlockX());
  const StepSequence& sequence = step.sequence(selection.lane / layer.kv_heads);
  const std::uint32_t asked = sequence.queries * params.group;
  const std::uint32_t tail = VisibleTailRows(params, step, selection);
  const SelectLane lane = {.index = gpu::BlockX(),
                           .columns = asked < params.max_columns ? asked : params.max_columns,
                           .blocks = selection.blocks,
                           .forced = ForcedOf(selection, tail),
                           .scores = params.scores + selection.first_block,
                           .values = params.values + selection.first_block,
                           .visible = params.visible + selection.first_block,
                           .taken = params.taken + selection.first_block};
  const SelectShared shared;
  const bool by_share = sequence.rule.by_share != 0;
  if (by_share) SumRows(params, step, lane);
  gpu::SyncBlock();
  const Visible own = LaneValues(params, lane, by_share);
  const std::uint32_t visible = SumOverBlock(own.entries, shared).all;
  const std::uint32_t forced = SumOverBlock(own.forced, shared).all;
  const std::uint32_t newest =
      lane.forced.last == ForcedBlocks::kNone ? 0 : lane.visible[lane.forced.last];
  const std::uint64_t budget =
      BudgetOf(sequence.rule, {.entries = visible,
                               .newest = tail + VisibleUnblockedRows(params, step, selection),
                               .partial = newest < selection.tail_block ? newest : 0,
                               .block = selection.tail_block});
  Threshold threshold;
  if (budget > forced) {
    threshold = FindThreshold(lane, shared, static_cast<std::uint32_t>(budget) - forced);
  }
  const StepChoice* choices = step.choices(params.layer) + selection.first_choice;
  SelectedRange* ranges = params.ranges + FirstRangeOf(selection, lane.index);
  const std::uint32_t taken =
      ListSelected(lane, shared, threshold, choices, selection.choices, ranges);
  gpu::SyncBlock();
  if (gpu::Thread() != 0 || CutParts(params, step, selection, lane.index, taken, ranges)) return;
  // Too many parts: the position words do not increase, so this is memory under a revoked reader.
  gpu::AtomicMin(params.fault, FaultWord::Pack(FaultKind::kBadTile, params.layer, selection.lane));
}

}  // namespace tessera::kernels::cuda
