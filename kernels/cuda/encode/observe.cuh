// Computes the attention weights that queries give to keys, and adds them up per key. Two launches
// handle kObservedQueries queries at a time:
//
//   products   grid: jobs, pieces of keys, 8 queries each. A warp takes 4 keys at once; each lane
//              multiplies part of their channels for all 8 queries. The 32 sums are then reduced
//              across lanes, so that lane l ends with key l / 8, query l % 8. Stores logits, and
//              each query's maximum and sum over the piece
//   sums       grid: jobs, pieces of keys. Combines the pieces' sums of each query. Then one thread
//              per key adds up the key's weights, in query order and in double
//
// There are no atomics, so the bits of the result depend on the job alone.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/common/gpu.cuh"
#include "kernels/cuda/common/lane_sums.cuh"
#include "kernels/cuda/encode/observe_index.h"
#include "kernels/cuda/encode/tile_ops_params.h"

namespace tessera::kernels::cuda {

// Channels 2 (lane + 32 i) and the next one of a row.
template <std::uint32_t kHeadDim>
struct LaneChannels {
  static constexpr std::uint32_t kPairs = kHeadDim / kWarp / 2;
  float low[kPairs];
  float high[kPairs];

  // Loads zeros if `row` is null.
  TESSERA_DEVICE void Load(ElementType type, const std::byte* row) {
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < kPairs; ++i) {
      const std::uint32_t pair = gpu::Lane() + kWarp * i;
      low[i] = high[i] = 0;
      if (row == nullptr) continue;
      if (type == ElementType::kFp32) {
        low[i] = reinterpret_cast<const float*>(row)[2 * pair];
        high[i] = reinterpret_cast<const float*>(row)[2 * pair + 1];
        continue;
      }
      const std::uint32_t word = reinterpret_cast<const std::uint32_t*>(row)[pair];
      const bool bf16 = type == ElementType::kBf16;
      low[i] = bf16 ? std::bit_cast<float>(word << 16)
                    : gpu::HalfToFloat(static_cast<std::uint16_t>(word));
      high[i] = bf16 ? std::bit_cast<float>(word & 0xffff0000u)
                     : gpu::HalfToFloat(static_cast<std::uint16_t>(word >> 16));
    }
  }
  TESSERA_DEVICE float Product(const LaneChannels& other) const {
    float sum = 0;
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < kPairs; ++i) {
      sum += low[i] * other.low[i];
      sum += high[i] * other.high[i];
    }
    return sum;
  }
};

// The keys that a query sees.
struct SeenKeys {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  TESSERA_DEVICE bool Contains(std::uint64_t key) const { return begin <= key && key < end; }
};
TESSERA_DEVICE SeenKeys SeenBy(const ObserveTileJob& job, std::uint32_t query) {
  const auto* begins = reinterpret_cast<const std::uint64_t*>(job.visible_begin);
  const auto* ends = reinterpret_cast<const std::uint64_t*>(job.visible_end);
  return {.begin = begins == nullptr ? 0 : begins[query], .end = ends[query]};
}

// In log2 units, saturated to the finite range before the weight is added. NaN is passed on.
TESSERA_DEVICE float ObservedLogit(const ObserveForm& form, float product, float log2_weight) {
  constexpr float kLog2E = 1.44269504088896340736f;
  constexpr float kLargest = 3.40282347e+38f;
  float logit = product * form.scale;
  if (form.logit_softcap != 0) {
    logit = form.logit_softcap * gpu::Tanh(logit / form.logit_softcap);
  }
  logit *= kLog2E;
  if (logit > kLargest) logit = kLargest;
  if (logit < -kLargest) logit = -kLargest;
  return logit + log2_weight;
}

// The product of key lane / 8 and query lane % 8. Keys from `end` on are not read. Warp-collective.
template <std::uint32_t kHeadDim>
TESSERA_DEVICE float MultiplyKeys(ElementType type, const ObserveTileJob& job, std::uint64_t first,
                                  std::uint64_t end,
                                  const LaneChannels<kHeadDim> (&queries)[kTileColumns]) {
  float sums[kWarp];
  TESSERA_UNROLL
  for (std::uint32_t r = 0; r < kObserveAhead; ++r) {
    const auto* keys = reinterpret_cast<const std::byte*>(job.keys);
    LaneChannels<kHeadDim> key;
    key.Load(type, first + r < end ? keys + (first + r) * job.key_stride : nullptr);
    TESSERA_UNROLL
    for (std::uint32_t c = 0; c < kTileColumns; ++c) {
      sums[r * kTileColumns + c] = key.Product(queries[c]);
    }
  }
  return SumAcrossLanes(sums);
}

template <std::uint32_t kHeadDim>
TESSERA_DEVICE void ObserveProducts(const ObserveTilesParams& params) {
  const ObserveTileJob job = params.jobs[gpu::BlockX()];
  const std::uint64_t piece = gpu::BlockY();
  const std::uint64_t first_key = piece * kObservedKeys;
  const std::uint32_t first_slot = gpu::BlockZ() * kTileColumns;
  const std::uint32_t first_query = params.first_query + first_slot;
  if (first_key >= job.key_count || first_query >= job.query_count) return;
  const std::uint64_t left = job.key_count - first_key;
  const std::uint64_t end = first_key + (left < kObservedKeys ? left : kObservedKeys);

  const std::uint32_t own = gpu::Lane() % kTileColumns;
  SeenKeys seen;  // by this lane's query
  if (first_query + own < job.query_count) seen = SeenBy(job, first_query + own);
  LaneChannels<kHeadDim> queries[kTileColumns];
  TESSERA_UNROLL
  for (std::uint32_t c = 0; c < kTileColumns; ++c) {
    const auto* rows = reinterpret_cast<const std::byte*>(job.queries);
    queries[c].Load(params.form.type, first_query + c < job.query_count
                                          ? rows + (first_query + c) * job.query_stride
                                          : nullptr);
  }
  const auto* weights = reinterpret_cast<const float*>(job.log2_weights);
  float* scratch = params.scratch + job.scratch_at;
  LogSum paid;
  for (std::uint64_t key = first_key + gpu::Warp() * kObserveAhead; key < end;
       key += kObserveWarps * kObserveAhead) {
    // Keys that none of these queries sees are not read.
    if (gpu::Ballot(seen.begin < key + kObserveAhead && key < seen.end) == 0) continue;
    const float product = MultiplyKeys<kHeadDim>(params.form.type, job, key, end, queries);
    const std::uint64_t own_key = key + gpu::Lane() / kTileColumns;
    if (!seen.Contains(own_key)) continue;
    const float weight = weights == nullptr ? 0 : weights[own_key];
    const float x = params.form.logits ? product : ObservedLogit(params.form, product, weight);
    scratch[ObservedLogitAt(job.key_count, first_slot + own, own_key)] = x;
    if (!params.form.logits) paid.Add(x, 1);
  }
  if (params.form.logits) return;
  auto* shared = reinterpret_cast<float*>(gpu::SharedMemory());
  const LogSum all = AddColumns<kObserveWarps>(paid, shared);
  if (gpu::Thread() < kTileColumns) {
    float* target = scratch + ObservedPieceAt(job.key_count, first_slot + gpu::Thread(), piece);
    target[0] = all.maximum;
    target[1] = all.sum;
  }
}

// Combines the sums of all pieces for the query in `slot`. Warp-collective.
TESSERA_DEVICE LogSum AddPieces(const ObserveTileJob& job, const float* scratch,
                                std::uint32_t slot) {
  LogSum all;
  for (std::uint64_t p = gpu::Lane(); p < ObservePieces(job.key_count); p += kWarp) {
    const float* piece = scratch + ObservedPieceAt(job.key_count, slot, p);
    all.Add(piece[0], piece[1]);
  }
  all.AddLanes<1>();
  return all;
}

TESSERA_DEVICE void ObserveSums(const ObserveTilesParams& params) {
  const ObserveTileJob job = params.jobs[gpu::BlockX()];
  const std::uint64_t first_key = std::uint64_t{gpu::BlockY()} * kObservedKeys;
  if (first_key >= job.key_count || params.first_query >= job.query_count) return;
  const float* scratch = params.scratch + job.scratch_at;
  auto* queries = reinterpret_cast<ObservedQuery*>(gpu::SharedMemory());
  const std::uint32_t left = job.query_count - params.first_query;
  const std::uint32_t count = left < kObservedQueries ? left : kObservedQueries;
  for (std::uint32_t slot = gpu::Warp(); slot < count; slot += gpu::Threads() / kWarp) {
    const SeenKeys seen = SeenBy(job, params.first_query + slot);
    LogSum all;
    if (!params.form.logits) all = AddPieces(job, scratch, slot);
    if (gpu::Lane() == 0) {
      queries[slot] = {
          .begin = seen.begin, .end = seen.end, .maximum = all.maximum, .factor = 1 / all.sum};
    }
  }
  gpu::SyncBlock();
  const std::uint64_t key = first_key + gpu::Thread();
  if (key >= job.key_count) return;
  double* sum = reinterpret_cast<double*>(job.sums) + key;
  double paid = *sum;
  for (std::uint32_t slot = 0; slot < count; ++slot) {
    const ObservedQuery& query = queries[slot];
    if (key < query.begin || key >= query.end) continue;
    const float x = scratch[ObservedLogitAt(job.key_count, slot, key)];
    paid += params.form.logits ? x : gpu::Exp2(x - query.maximum) * query.factor;
  }
  *sum = paid;
}

}  // namespace tessera::kernels::cuda
