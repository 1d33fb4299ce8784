// Selects blocks. Written over the including file's `Simd`. Internal linkage throughout: see
// ../README.md.
//
//   values     per block, the maximum over rows of score - log-sum-exp
//   threshold  the largest key such that blocks at or above it hold the budget. Each pass over the
//              values narrows the range, first by a sample, then to an eighth, until few blocks are
//              left; those are sorted
//   taken      the blocks above the threshold, then those equal to it in order
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attend/tile_math-inl.h"
#include "kernels/format/part.h"

namespace tessera::kernels {
namespace {

static_assert(sizeof(BlockFacts) == 2);
constexpr std::uint32_t kEntriesMask = 0xff;  // facts as a little-endian 16-bit word

// Calls visit(first block, vector of `numbers`, vector of facts) over whole vectors; the last one
// is padded.
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

// Writes one byte per existing lane.
TESSERA_SIMD void StoreFlags(const SelectJob& job, std::uint32_t first, std::uint32_t bits) {
  if (first + Simd::kLanes <= job.block_count) return Simd::StoreFlags(job.taken + first, bits);
  for (std::uint32_t b = first; b < job.block_count; ++b) job.taken[b] = bits >> (b - first) & 1u;
}

TESSERA_SIMD std::uint32_t CandidateBits(typename Simd::Integers facts) {
  constexpr std::uint32_t kAll = Simd::kLanes == 32 ? ~0u : (1u << Simd::kLanes) - 1;
  return ~Simd::ZeroBits(Simd::And(facts, Simd::SplatInteger(kEntriesMask))) & kAll;
}

// ln sum exp over the candidates; 0 if there are none.
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
      // Adding zero turns -0 into 0: they are equal, so their keys must be.
      auto value = Simd::Add(Simd::Subtract(Simd::Load(scores + b), less), Simd::Zero());
      // Max returns the second operand for NaN, so NaN becomes -infinity. A NaN that reached the
      // threshold search could make it take more than the budget.
      value = Simd::Max(value, Simd::Splat(-kInfinity));
      if (r != 0) value = Simd::Max(value, Simd::Load(job.values + b));
      Simd::Store(job.values + b, value);
    }
    for (; b < job.block_count; ++b) {
      const float value = scores[b] - lse + 0.0f;
      const float least = r != 0 ? job.values[b] : -kInfinity;
      job.values[b] = value > least ? value : least;
    }
  }
}

TESSERA_SIMD std::uint32_t OrderedKeyOf(float value) {
  const auto bits = __builtin_bit_cast(std::uint32_t, value);
  return bits ^ (bits >> 31 != 0 ? 0xffffffffu : 0x80000000u);
}

// For each key: the entries of the free (not forced) candidates whose key is at least that.
constexpr int kKeysAtOnce = 7;

TESSERA_SIMD void CountFrom(const SelectJob& job, const std::uint32_t (&keys)[kKeysAtOnce],
                            std::uint64_t (&entries)[kKeysAtOnce]) {
  typename Simd::Integers sums[kKeysAtOnce];  // 2^24 blocks of 16 entries fit a lane
  typename Simd::Integers limits[kKeysAtOnce];
  TESSERA_UNROLL for (int i = 0; i < kKeysAtOnce; ++i) {
    sums[i] = Simd::SplatInteger(0);
    limits[i] = Simd::SplatInteger(keys[i]);
  }
  const auto forced = Simd::SplatInteger(kEntriesMask + 1);
  ForEachVector(job, job.values, [&](std::uint32_t, auto value, auto facts) TESSERA_INLINE_LAMBDA {
    const auto key = Simd::OrderedKey(value);
    const auto counted =
        Simd::AddWhere(~Simd::AtLeastBits(facts, forced), Simd::SplatInteger(0), facts);
    TESSERA_UNROLL for (int i = 0; i < kKeysAtOnce; ++i) {
      sums[i] = Simd::AddWhere(Simd::AtLeastBits(key, limits[i]), sums[i], counted);
    }
  });
  TESSERA_UNROLL for (int i = 0; i < kKeysAtOnce; ++i) entries[i] = Simd::SumLanes(sums[i]);
}

constexpr std::uint32_t kFewEntries = 512;  // hence at most as many blocks

// The largest key such that the free candidates from it up hold `budget` entries. Sorts the
// candidates with keys in [low, high], which hold at most kFewEntries; those above hold `above`.
TESSERA_SIMD std::uint32_t ThresholdBySorting(const SelectJob& job, std::uint32_t low,
                                              std::uint32_t high, std::uint64_t above,
                                              std::uint64_t budget) {
  std::uint32_t keys[kFewEntries];
  std::uint32_t entries[kFewEntries];
  std::uint32_t count = 0;
  const auto least = Simd::SplatInteger(low);
  const auto most = Simd::SplatInteger(high);
  const auto forced = Simd::SplatInteger(kEntriesMask + 1);
  ForEachVector(
      job, job.values, [&](std::uint32_t first, auto value, auto facts) TESSERA_INLINE_LAMBDA {
        const auto ordered = Simd::OrderedKey(value);
        std::uint32_t bits = Simd::AtLeastBits(ordered, least) & Simd::AtLeastBits(most, ordered) &
                             CandidateBits(facts) & ~Simd::AtLeastBits(facts, forced);
        for (; bits != 0; bits &= bits - 1) {
          const std::uint32_t b = first + static_cast<std::uint32_t>(__builtin_ctz(bits));
          const std::uint32_t key = OrderedKeyOf(job.values[b]);
          std::uint32_t at = count++;
          for (; at > 0 && keys[at - 1] < key; --at) {  // descending
            keys[at] = keys[at - 1];
            entries[at] = entries[at - 1];
          }
          keys[at] = key;
          entries[at] = job.blocks[b].entries;
        }
      });
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

constexpr std::uint32_t kSamples = 64;

// Rising keys in the range, around the one at which a sample of the blocks holds its share of the
// budget; closer together if the sample is more certain.
TESSERA_SIMD void SampleKeys(const SelectJob& job, double share, const KeyRange& range,
                             std::uint32_t (&keys)[kKeysAtOnce]) {
  std::uint32_t sample[kSamples];
  for (std::uint32_t i = 0; i < kSamples; ++i) {
    const std::uint32_t key =
        OrderedKeyOf(job.values[std::uint64_t{i} * job.block_count / kSamples]);
    std::uint32_t at = i;
    for (; at > 0 && sample[at - 1] < key; --at) sample[at] = sample[at - 1];  // descending
    sample[at] = key;
  }
  const double rank = share * kSamples;
  const double deviation = __builtin_sqrt(rank * (1 - share)) + 1;
  for (int i = 0; i < kKeysAtOnce; ++i) {
    double at = rank + deviation * (kKeysAtOnce / 2 - i) * 0.75;
    at = at < 0 ? 0 : at;
    at = at > kSamples - 1 ? kSamples - 1 : at;
    const std::uint32_t key = sample[static_cast<int>(at)];
    keys[i] = key < range.low ? range.low : key > range.high ? range.high : key;
  }
}

TESSERA_SIMD void SplitEvenly(const KeyRange& range, std::uint32_t (&keys)[kKeysAtOnce]) {
  const auto [low, high] = range;
  const std::uint32_t step = (high - low) / (kKeysAtOnce + 1) + 1;
  for (int i = 0; i < kKeysAtOnce; ++i) {
    const std::uint32_t offset = step * static_cast<std::uint32_t>(i + 1);
    keys[i] = high - low < offset ? high : low + offset;
  }
}

// Requires 1 <= budget < all, where all is the entries of all free candidates.
TESSERA_SIMD std::uint32_t FindThreshold(const SelectJob& job, std::uint64_t budget,
                                         std::uint64_t all) {
  // The threshold is in [low, high]: candidates from `low` up hold the budget, those above `high`
  // do not.
  auto [low, high] = RangeOfKeys(job);
  std::uint64_t from_low = all;
  std::uint64_t above_high = 0;
  bool sampled = job.block_count < 16 * kSamples;
  while (low < high && from_low - above_high > kFewEntries) {
    std::uint32_t keys[kKeysAtOnce];
    if (sampled) {
      SplitEvenly({low, high}, keys);
    } else {
      SampleKeys(job, static_cast<double>(budget) / static_cast<double>(all), {low, high}, keys);
    }
    sampled = true;
    std::uint64_t entries[kKeysAtOnce];
    CountFrom(job, keys, entries);
    const std::uint32_t bottom = low;
    for (int i = 0; i < kKeysAtOnce; ++i) {  // keys rise, entries fall
      if (entries[i] >= budget) {
        low = keys[i];
        from_low = entries[i];
      } else if (keys[i] > bottom) {
        high = keys[i] - 1;
        above_high = entries[i];
        break;
      }
    }
  }
  return low == high ? low : ThresholdBySorting(job, low, high, above_high, budget);
}

// Takes the forced candidates, or all of them; returns the entries of the forced and free
// candidates.
struct Entries {
  std::uint64_t forced;
  std::uint64_t free;
};
TESSERA_SIMD Entries TakeForced(const SelectJob& job, bool everything) {
  auto forced = Simd::SplatInteger(0);
  auto free = Simd::SplatInteger(0);
  const auto mask = Simd::SplatInteger(kEntriesMask);
  const auto flag = Simd::SplatInteger(kEntriesMask + 1);
  ForEachVector(job, job.values, [&](std::uint32_t b, auto, auto facts) TESSERA_INLINE_LAMBDA {
    const auto entries = Simd::And(facts, mask);
    const std::uint32_t is_forced = Simd::AtLeastBits(facts, flag);
    forced = Simd::AddWhere(is_forced, forced, entries);
    free = Simd::AddWhere(~is_forced, free, entries);
    const std::uint32_t bits = CandidateBits(facts) & (everything ? ~0u : is_forced);
    StoreFlags(job, b, bits);
  });
  return {Simd::SumLanes(forced), Simd::SumLanes(free)};
}

// Takes the blocks above the threshold, then those equal to it in order, until the budget is met.
TESSERA_SIMD void TakeFrom(const SelectJob& job, std::uint32_t threshold, std::uint64_t budget) {
  std::uint64_t above = 0;
  if (threshold != ~0u) {
    std::uint32_t keys[kKeysAtOnce];
    std::uint64_t entries[kKeysAtOnce];
    for (std::uint32_t& key : keys) key = threshold + 1;
    CountFrom(job, keys, entries);
    above = entries[0];
  }
  const auto limit = Simd::SplatInteger(threshold);
  const auto flag = Simd::SplatInteger(kEntriesMask + 1);
  ForEachVector(job, job.values,
                [&](std::uint32_t b, auto value, auto facts) TESSERA_INLINE_LAMBDA {
                  const auto key = Simd::OrderedKey(value);
                  const std::uint32_t candidates = CandidateBits(facts);
                  const std::uint32_t is_forced = candidates & Simd::AtLeastBits(facts, flag);
                  const std::uint32_t at_least = candidates & Simd::AtLeastBits(key, limit);
                  std::uint32_t ties = at_least & Simd::AtLeastBits(limit, key) & ~is_forced;
                  std::uint32_t bits = (at_least & ~ties) | is_forced;
                  for (; ties != 0 && above < budget; ties &= ties - 1) {
                    const int lane = __builtin_ctz(ties);
                    bits |= 1u << lane;
                    above += job.blocks[b + static_cast<std::uint32_t>(lane)].entries;
                  }
                  StoreFlags(job, b, bits);
                });
}

static void SelectSimd(const SelectJob& job) {
  FindValues(job);
  const Entries entries = TakeForced(job, /*everything=*/false);
  if (entries.forced >= job.budget) return;
  const std::uint64_t budget = job.budget - entries.forced;
  if (entries.free <= budget) {
    TakeForced(job, /*everything=*/true);
    return;
  }
  TakeFrom(job, FindThreshold(job, budget, entries.free), budget);
}

}  // namespace
}  // namespace tessera::kernels
