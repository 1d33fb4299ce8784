// Choosing blocks, over the vocabulary `Simd` that the including file has chosen. Internal linkage
// throughout: see README.md.
//
//   values     over rows the largest of score - log-sum-exp
//   threshold  the largest key at which the blocks at or above it hold the budget: bit by bit from
//              the highest in which the candidates' keys differ, a pass over the values each, until
//              few are left between the bounds; those are sorted
//   taken      what is above the threshold, and in order what is at it
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/tile_math-inl.h"
#include "kernels/format/part.h"

namespace tessera::kernels {
namespace {

static_assert(sizeof(BlockFacts) == 2);
constexpr std::uint32_t kEntriesMask = 0xff;  // of the facts as a little-endian 16-bit word

// Calls visit(first block, lane bits of existing candidates, score vector loader) over whole
// vectors; the last one is padded.
template <class Visit>
TESSERA_SIMD void ForEachVector(const SelectJob& job, const float* numbers, Visit visit) {
  constexpr auto kLanes = static_cast<std::uint32_t>(Simd::kLanes);
  std::uint32_t b = 0;
  for (; b + kLanes <= job.block_count; b += kLanes) {
    visit(b, Simd::Load(numbers + b), Simd::LoadHalfWords(job.blocks + b));
  }
  if (b == job.block_count) return;
  alignas(64) float last[Simd::kLanes] = {};
  BlockFacts facts[Simd::kLanes] = {};
  __builtin_memcpy(last, numbers + b, (job.block_count - b) * sizeof(float));
  __builtin_memcpy(facts, job.blocks + b, (job.block_count - b) * sizeof(BlockFacts));
  visit(b, Simd::Load(last), Simd::LoadHalfWords(facts));
}

TESSERA_SIMD std::uint32_t CandidateBits(typename Simd::Integers facts) {
  constexpr std::uint32_t kAll = Simd::kLanes == 32 ? ~0u : (1u << Simd::kLanes) - 1;
  return ~Simd::ZeroBits(Simd::And(facts, Simd::SplatInteger(kEntriesMask))) & kAll;
}

// ln sum exp over the candidates; 0 where there are none.
TESSERA_SIMD float LogSumExp(const SelectJob& job, const float* scores) {
  auto max = Simd::Splat(-kInfinity);
  ForEachVector(job, scores, [&](std::uint32_t, auto score, auto facts) TESSERA_INLINE_LAMBDA {
    max = Simd::Max(max, Simd::WhereBits(CandidateBits(facts), score, Simd::Splat(-kInfinity)));
  });
  const float largest = Simd::MaxLane(max);
  if (largest == -kInfinity) return 0;
  auto sum = Simd::Zero();
  const auto base = Simd::Splat(largest);
  const auto to_log2 = Simd::Splat(kLog2E);
  ForEachVector(job, scores, [&](std::uint32_t, auto score, auto facts) TESSERA_INLINE_LAMBDA {
    const auto x = Simd::Multiply(Simd::Subtract(score, base), to_log2);
    sum = Simd::Add(sum,
                    Simd::Exp2(Simd::WhereBits(CandidateBits(facts), x, Simd::Splat(-kInfinity))));
  });
  alignas(64) float lanes[Simd::kLanes];
  Simd::Store(lanes, sum);
  float total = 0;
  for (float lane : lanes) total += lane;
  Simd::Store(lanes, Log2<Simd>(Simd::Splat(total)));
  constexpr float kNaturalOfLog2 = 0.693147182f;
  return largest + lanes[0] * kNaturalOfLog2;
}

TESSERA_SIMD void FindValues(const SelectJob& job) {
  for (std::uint32_t r = 0; r < job.row_count; ++r) {
    const float* scores = job.scores + r * job.score_stride;
    const float lse = job.by_share ? LogSumExp(job, scores) : 0;
    std::uint32_t b = 0;
    const auto less = Simd::Splat(lse);
    for (; b + Simd::kLanes <= job.block_count; b += Simd::kLanes) {
      // Adding zero turns -0 into 0: they are equal, and their keys must be.
      auto value = Simd::Add(Simd::Subtract(Simd::Load(scores + b), less), Simd::Zero());
      if (r != 0) value = Simd::Max(value, Simd::Load(job.values + b));
      Simd::Store(job.values + b, value);
    }
    for (; b < job.block_count; ++b) {
      const float value = scores[b] - lse + 0.0f;
      job.values[b] = r != 0 && !(value > job.values[b]) ? job.values[b] : value;
    }
  }
}

TESSERA_SIMD std::uint32_t OrderedKeyOf(float value) {
  const auto bits = __builtin_bit_cast(std::uint32_t, value);
  return bits ^ (bits >> 31 != 0 ? 0xffffffffu : 0x80000000u);
}

// A free candidate is neither forced nor without entries.
TESSERA_SIMD bool IsFree(const BlockFacts& facts) {
  return facts.entries != 0 && facts.forced == 0;
}

struct Count {
  std::uint64_t entries;
  std::uint32_t blocks;
};

// The free candidates whose key is at least `key`. A 32-bit lane sum holds 2^28 blocks.
TESSERA_SIMD Count CountFrom(const SelectJob& job, std::uint32_t key) {
  auto entries = Simd::SplatInteger(0);
  auto blocks = Simd::SplatInteger(0);
  const auto limit = Simd::SplatInteger(key);
  const auto one = Simd::SplatInteger(1);
  const auto is_forced = Simd::SplatInteger(~kEntriesMask);
  ForEachVector(job, job.values, [&](std::uint32_t, auto value, auto facts) TESSERA_INLINE_LAMBDA {
    const std::uint32_t bits = CandidateBits(facts) & Simd::ZeroBits(Simd::And(facts, is_forced)) &
                               Simd::AtLeastBits(Simd::OrderedKey(value), limit);
    entries = Simd::AddWhere(bits, entries, facts);
    blocks = Simd::AddWhere(bits, blocks, one);
  });
  return {Simd::SumLanes(entries), Simd::SumLanes(blocks)};
}

constexpr std::uint32_t kFewBlocks = 64;

// The largest key at which the free candidates from it up hold `budget` entries, by sorting those
// with keys in [low, high], at most kFewBlocks; those above hold `above`.
TESSERA_SIMD std::uint32_t SortOut(const SelectJob& job, std::uint32_t low, std::uint32_t high,
                                   std::uint64_t above, std::uint64_t budget) {
  std::uint32_t keys[kFewBlocks];
  std::uint32_t entries[kFewBlocks];
  std::uint32_t count = 0;
  for (std::uint32_t b = 0; b < job.block_count; ++b) {
    const std::uint32_t key = OrderedKeyOf(job.values[b]);
    if (key < low || key > high || !IsFree(job.blocks[b])) continue;
    std::uint32_t at = count++;
    for (; at > 0 && keys[at - 1] < key; --at) {  // falling
      keys[at] = keys[at - 1];
      entries[at] = entries[at - 1];
    }
    keys[at] = key;
    entries[at] = job.blocks[b].entries;
  }
  for (std::uint32_t i = 0; i < count; ++i) {
    above += entries[i];
    if (above >= budget) return keys[i];
  }
  return low;
}

struct KeyRange {
  std::uint32_t low;
  std::uint32_t high;
};

TESSERA_SIMD KeyRange RangeOfKeys(const SelectJob& job) {
  auto least = Simd::Splat(kInfinity);
  auto greatest = Simd::Splat(-kInfinity);
  ForEachVector(job, job.values, [&](std::uint32_t, auto value, auto facts) TESSERA_INLINE_LAMBDA {
    const std::uint32_t bits = CandidateBits(facts);
    least = Simd::Min(least, Simd::WhereBits(bits, value, Simd::Splat(kInfinity)));
    greatest = Simd::Max(greatest, Simd::WhereBits(bits, value, Simd::Splat(-kInfinity)));
  });
  const float low = -Simd::MaxLane(Simd::Subtract(Simd::Zero(), least)) + 0.0f;
  return {OrderedKeyOf(low), OrderedKeyOf(Simd::MaxLane(greatest))};
}

// 1 <= budget <= the entries of all free candidates.
TESSERA_SIMD std::uint32_t FindThreshold(const SelectJob& job, std::uint64_t budget,
                                         const Count& all) {
  // The threshold is in [low, high]: candidates from `low` up hold the budget, those above `high`
  // do not.
  auto [low, high] = RangeOfKeys(job);
  Count from_low = all;
  Count above_high = {0, 0};
  while (low < high && from_low.blocks - above_high.blocks > kFewBlocks) {
    const std::uint32_t middle = low + (high - low) / 2 + 1;
    const Count from_middle = CountFrom(job, middle);
    if (from_middle.entries >= budget) {
      low = middle;
      from_low = from_middle;
    } else {
      high = middle - 1;
      above_high = from_middle;
    }
  }
  if (low == high) return low;
  return SortOut(job, low, high, above_high.entries, budget);
}

static void SelectSimd(const SelectJob& job) {
  FindValues(job);
  std::uint64_t forced = 0;
  for (std::uint32_t b = 0; b < job.block_count; ++b) {
    const BlockFacts& facts = job.blocks[b];
    job.taken[b] = facts.entries != 0 && facts.forced != 0 ? 1 : 0;
    forced += job.taken[b] != 0 ? facts.entries : 0;
  }
  if (forced >= job.budget) return;
  const std::uint64_t budget = job.budget - forced;
  const Count all = CountFrom(job, 0);
  if (all.entries <= budget) {
    for (std::uint32_t b = 0; b < job.block_count; ++b) {
      job.taken[b] = job.blocks[b].entries != 0 ? 1 : 0;
    }
    return;
  }
  const std::uint32_t threshold = FindThreshold(job, budget, all);
  std::uint64_t above = threshold == ~0u ? 0 : CountFrom(job, threshold + 1).entries;
  for (std::uint32_t b = 0; b < job.block_count; ++b) {
    if (!IsFree(job.blocks[b])) continue;
    const std::uint32_t key = OrderedKeyOf(job.values[b]);
    if (key > threshold) {
      job.taken[b] = 1;
    } else if (key == threshold && above < budget) {
      job.taken[b] = 1;
      above += job.blocks[b].entries;
    }
  }
}

}  // namespace
}  // namespace tessera::kernels
