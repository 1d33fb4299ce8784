// Reductions across lanes and warps that produce several results at once: 32 sums per warp, one for
// each lane, and the softmax sums of 8 columns.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/fragment.h"
#include "kernels/cuda/common/gpu.cuh"
#include "kernels/cuda/common/tuning.h"

namespace tessera::kernels::cuda {

// Transposing reduction: lane l returns the sum of sums[l % kCount] over the kCount lanes that
// differ from it only in the lowest bits. In each step a lane gives half of its sums to its
// partner.
template <std::uint32_t kCount, std::uint32_t kHalf = kCount / 2>
TESSERA_DEVICE float SumAcrossLanes(float (&sums)[kCount]) {
  const bool upper = (gpu::Lane() & kHalf) != 0;
  TESSERA_UNROLL
  for (std::uint32_t i = 0; i < kHalf; ++i) {
    const float given = upper ? sums[i] : sums[i + kHalf];
    const float kept = upper ? sums[i + kHalf] : sums[i];
    sums[i] = kept + gpu::ShuffleXor(given, kHalf);
  }
  if constexpr (kHalf > 1) {
    return SumAcrossLanes<kCount, kHalf / 2>(sums);
  } else {
    return sums[0];
  }
}

// A running log-sum: the maximum of the added terms x, and the sum of 2^(x - maximum).
struct LogSum {
  float maximum = gpu::NegativeInfinity();
  float sum = 0;

  TESSERA_DEVICE void Add(float other_maximum, float other_sum) {
    const float next = gpu::Max(maximum, other_maximum);
    const float reference = next == gpu::NegativeInfinity() ? 0 : next;
    // Two products and one sum, so both lanes of an exchange compute the same bits.
    sum = sum * gpu::Exp2(maximum - reference) + other_sum * gpu::Exp2(other_maximum - reference);
    maximum = next;
  }
  // Adds the results of all lanes that differ from this one in bits kFirst and above.
  // Warp-collective.
  template <std::uint32_t kFirst>
  TESSERA_DEVICE void AddLanes() {
    TESSERA_UNROLL
    for (std::uint32_t mask = kFirst; mask < kWarp; mask *= 2) {
      const float other_maximum = gpu::ShuffleXor(maximum, mask);
      const float other_sum = gpu::ShuffleXor(sum, mask);
      Add(other_maximum, other_sum);
    }
  }
  // Returns 0 if no term was added, or only -infinity.
  TESSERA_DEVICE float Log2() const {
    return maximum == gpu::NegativeInfinity() && sum == 0 ? 0 : maximum + gpu::Log2(sum);
  }
};

// Adds up what the warps stored for this thread's column. Threads beyond the last column get an
// empty sum. Block-collective.
template <std::uint32_t kWarps>
TESSERA_DEVICE LogSum AddWarps(const float* shared) {
  gpu::SyncBlock();
  LogSum all;
  if (gpu::Thread() < kTileColumns) {
    for (std::uint32_t w = 0; w < kWarps; ++w) {
      const float* of_warp = shared + (w * kTileColumns + gpu::Thread()) * 2;
      all.Add(of_warp[0], of_warp[1]);
    }
  }
  return all;
}

// Reduces per-lane sums of 8 columns, where lane l holds a sum of column l % 8. Thread c < 8
// returns the total of column c, added in lane and warp order; other threads return an empty sum.
// Block-collective. The block must not touch `shared` (kWarps x 8 x 2 floats) before its next
// barrier.
template <std::uint32_t kWarps>
TESSERA_DEVICE LogSum AddColumns(LogSum found, float* shared) {
  found.AddLanes<kTileColumns>();
  if (gpu::Lane() < kTileColumns) {
    float* own = shared + (gpu::Warp() * kTileColumns + gpu::Lane()) * 2;
    own[0] = found.maximum;
    own[1] = found.sum;
  }
  return AddWarps<kWarps>(shared);
}

// Like AddColumns, for the layout of accumulators: lane l holds sums of columns l % 4 * 2 and the
// next.
template <std::uint32_t kWarps>
TESSERA_DEVICE LogSum AddColumnPairs(LogSum (&found)[2], float* shared) {
  TESSERA_UNROLL
  for (std::uint32_t i = 0; i < 2; ++i) {
    found[i].AddLanes<4>();
    if (gpu::Lane() >= 4) continue;
    float* own = shared + (gpu::Warp() * kTileColumns + AccumulatorColumn(gpu::Lane(), i)) * 2;
    own[0] = found[i].maximum;
    own[1] = found[i].sum;
  }
  return AddWarps<kWarps>(shared);
}

}  // namespace tessera::kernels::cuda
