// Computes the attention that queries pay to keys. Written over the including file's `Simd`.
// Internal linkage throughout: see ../README.md.
//
//   for each group of up to kObserveRows queries, over blocks of 32 keys:
//     logits   dot products computed as in attention, with the block as a tile; stored in scratch
//     weights  2^(x - max) of each query, and their sum
//     sums     weights / sum over all queries, added in fp32, then to the caller's doubles
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attend/attend_part-inl.h"
#include "kernels/format/part.h"

namespace tessera::kernels {
namespace {

// Weights are summed in fp32 over this many blocks, then in double, so precision does not depend on
// the number of keys.
constexpr std::uint64_t kSummedBlocks = 16;

// The queries processed together.
struct ObservedRows {
  alignas(64) float queries[kObserveRows * kMaxHeadDim];  // in LoadPair's order
  alignas(64) float peaks[kObserveRows][Simd::kLanes];    // the largest logit per lane
  float factors[kObserveRows];                            // multiply weights before adding to sums
  std::uint32_t first;
  std::uint32_t count;
  std::uint64_t begin;  // keys visible to any row; blocks are counted from `begin`
  std::uint64_t end;
};

// The keys of the block at `key` that are visible to a query, one bit each.
TESSERA_SIMD std::uint32_t SeenBits(const ObserveJob& job, std::uint32_t row, std::uint64_t key) {
  constexpr std::uint64_t kAll = kTileRows;
  const std::uint64_t begin = job.visible_begin == nullptr ? 0 : job.visible_begin[row];
  const std::uint64_t end = job.visible_end[row];
  return RowBits(static_cast<int>(begin > key ? Least(begin - key, kAll) : 0),
                 static_cast<int>(end > key ? Least(end - key, kAll) : 0));
}

// Calls run(values) with a row's scratch of the block at `key`. In a short last block the lanes
// after the last key are -infinity and are not written back.
template <class Run>
TESSERA_SIMD void WithBlock(const ObserveJob& job, std::uint32_t slot, std::uint64_t key, Run run) {
  float* at = job.scratch + slot * job.key_count + key;
  if (job.key_count - key >= kTileRows) {
    run(at);
    return;
  }
  alignas(64) float block[kTileRows];
  for (float& each : block) each = -kInfinity;
  const std::size_t bytes = (job.key_count - key) * sizeof(float);
  __builtin_memcpy(block, at, bytes);
  run(block);
  __builtin_memcpy(at, block, bytes);
}

// Loads log2 weights of the block at `key`; 0 after the last key.
TESSERA_SIMD void LoadWeights(const ObserveJob& job, std::uint64_t key, float* weights) {
  for (int i = 0; i < kTileRows; ++i) weights[i] = 0;
  if (job.log2_weights == nullptr) return;
  __builtin_memcpy(weights, job.log2_weights + key,
                   Least(job.key_count - key, kTileRows) * sizeof(float));
}

// Writes the products of rows [slot, slot + kRows) with the keys of one block to scratch: either as
// logits in log2 units, -infinity for invisible keys, or unchanged.
template <ElementType kType, int kRows>
static void ProductsOfBlock(const ObserveJob& job, const Logits& logits, std::uint64_t key,
                            std::uint32_t slot, ObservedRows& rows) {
  std::uint32_t seen[kRows];
  std::uint32_t any = 0;
  for (std::uint32_t n = 0; n < kRows; ++n) {
    seen[n] = SeenBits(job, rows.first + slot + n, key);
    any |= seen[n];
  }
  if (any == 0) return;
  const Span live = SpanOf(any);
  const TileView keys = {.keys = job.keys + key * job.key_stride,
                         .values = nullptr,
                         .row_bytes = job.key_stride,
                         .head_dim = static_cast<int>(job.head_dim)};
  const float* queries = rows.queries + slot * job.head_dim;
  alignas(64) float weights[kTileRows];
  LoadWeights(job, key, weights);
  alignas(64) float products[kRows][kTileRows];
  DotRows<kRows>(
      live,
      [&](int first, typename Simd::Floats(&block)[kRows])
          TESSERA_INLINE_LAMBDA { DotBlocks<kType, kRows>(keys, live, first, queries, block); },
      [](int) TESSERA_INLINE_LAMBDA {}, products);
  for (std::uint32_t n = 0; n < kRows; ++n) {
    WithBlock(job, slot + n, key, [&](float* values) TESSERA_INLINE_LAMBDA {
      auto peak = Simd::Load(rows.peaks[slot + n]);
      TESSERA_UNROLL for (int i = 0; i < kTileRows; i += Simd::kLanes) {
        auto x = Simd::Load(products[n] + i);
        if (!job.logits) {
          x = Simd::Add(ToLog2(x, logits), Simd::Load(weights + i));
          x = Simd::WhereBits(seen[n] >> i, x, Simd::Splat(-kInfinity));
          peak = Simd::Max(peak, x);
        }
        Simd::Store(values + i, x);
      }
      Simd::Store(rows.peaks[slot + n], peak);
    });
  }
}

TESSERA_SIMD double SumOfLanes(typename Simd::Floats value) {
  alignas(64) float lanes[Simd::kLanes];
  Simd::Store(lanes, value);
  double sum = 0;
  for (const float each : lanes) sum += each;
  return sum;
}

// Turns a row's logits into weights; returns their sum.
static double WeighObserved(const ObserveJob& job, const ObservedRows& rows, std::uint32_t slot) {
  const float max = Simd::MaxLane(Simd::Load(rows.peaks[slot]));
  const auto base = Simd::Splat(max == -kInfinity ? 0.0f : max);  // avoids -inf - -inf
  double total = 0;
  for (std::uint64_t from = rows.begin; from < rows.end; from += kSummedBlocks * kTileRows) {
    const std::uint64_t to = Least(rows.end, from + kSummedBlocks * kTileRows);
    auto sum = Simd::Zero();
    for (std::uint64_t key = from; key < to; key += kTileRows) {
      if (SeenBits(job, rows.first + slot, key) == 0) continue;
      WithBlock(job, slot, key, [&](float* values) TESSERA_INLINE_LAMBDA {
        TESSERA_UNROLL for (int i = 0; i < kTileRows; i += Simd::kLanes) {
          const auto weight = Simd::Exp2(Simd::Subtract(Simd::Load(values + i), base));
          sum = Simd::Add(sum, weight);
          Simd::Store(values + i, weight);
        }
      });
    }
    total += SumOfLanes(sum);
  }
  return total;
}

// sums += the attention that the rows pay to the keys of one block.
TESSERA_SIMD void AddObserved(const ObserveJob& job, const ObservedRows& rows, std::uint64_t key) {
  constexpr int kVectors = kTileRows / Simd::kLanes;
  typename Simd::Floats paid[kVectors];
  TESSERA_UNROLL for (auto& each : paid) each = Simd::Zero();
  for (std::uint32_t slot = 0; slot < rows.count; ++slot) {
    const std::uint32_t seen = SeenBits(job, rows.first + slot, key);
    if (seen == 0) continue;
    const auto factor = Simd::Splat(rows.factors[slot]);
    WithBlock(job, slot, key, [&](const float* values) TESSERA_INLINE_LAMBDA {
      TESSERA_UNROLL for (int i = 0; i < kVectors; ++i) {
        const int first = i * Simd::kLanes;
        const auto share = Simd::Multiply(Simd::Load(values + first), factor);
        paid[i] = Simd::Add(paid[i], Simd::WhereBits(seen >> first, share, Simd::Zero()));
      }
    });
  }
  alignas(64) float lanes[kTileRows];
  TESSERA_UNROLL for (int i = 0; i < kVectors; ++i) Simd::Store(lanes + i * Simd::kLanes, paid[i]);
  const auto count = static_cast<int>(Least(job.key_count - key, kTileRows));
  for (int i = 0; i < count; ++i) job.sums[key + static_cast<std::uint64_t>(i)] += lanes[i];
}

// Loads and converts rows [first, first + count).
template <ElementType kType>
TESSERA_SIMD void BeginObserved(const ObserveJob& job, std::uint32_t first, std::uint32_t count,
                                ObservedRows& rows) {
  rows.first = first;
  rows.count = count;
  rows.begin = job.key_count;
  rows.end = 0;
  for (std::uint32_t slot = 0; slot < count; ++slot) {
    const std::uint32_t row = first + slot;
    LoadQuery<kType>(job.queries + row * job.query_stride, static_cast<int>(job.head_dim),
                     rows.queries + slot * job.head_dim);
    Simd::Store(rows.peaks[slot], Simd::Splat(-kInfinity));
    rows.factors[slot] = 1;
    const std::uint64_t begin = job.visible_begin == nullptr ? 0 : job.visible_begin[row];
    const std::uint64_t end = job.visible_end[row];
    if (begin >= end) continue;
    rows.begin = Least(rows.begin, begin);
    rows.end = end > rows.end ? end : rows.end;
  }
}

template <ElementType kType>
static void ObserveElements(const ObserveJob& job) {
  const Logits logits = LogitsOf(job.scale, job.logit_softcap);
  ObservedRows rows;
  for (std::uint32_t first = 0; first < job.query_count; first += kObserveRows) {
    const std::uint32_t left = job.query_count - first;
    BeginObserved<kType>(job, first, left < kObserveRows ? left : kObserveRows, rows);
    for (std::uint64_t key = rows.begin; key < rows.end; key += kTileRows) {
      ForEachRowGroup(rows.count, [&]<int kRows>(std::uint32_t slot) {
        ProductsOfBlock<kType, kRows>(job, logits, key, slot, rows);
      });
    }
    for (std::uint32_t slot = 0; slot < rows.count && !job.logits; ++slot) {
      // Infinite if the row sees no key; then nothing is multiplied by it.
      rows.factors[slot] = static_cast<float>(1 / WeighObserved(job, rows, slot));
    }
    for (std::uint64_t key = rows.begin; key < rows.end; key += kTileRows) {
      AddObserved(job, rows, key);
    }
  }
}

static void ObserveSimd(const ObserveJob& job) {
  switch (job.type) {
    case ElementType::kBf16:
      return ObserveElements<ElementType::kBf16>(job);
    case ElementType::kFp16:
      return ObserveElements<ElementType::kFp16>(job);
    case ElementType::kFp32:
      return ObserveElements<ElementType::kFp32>(job);
  }
}

}  // namespace
}  // namespace tessera::kernels
