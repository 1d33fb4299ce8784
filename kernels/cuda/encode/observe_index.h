// Index arithmetic of an observation. Shared by the kernels and by the host code that launches
// them. Host tests check it against plain loops.
//
// Queries are handled kObservedQueries at a time. The scratch of a job, in floats:
//   [kObservedQueries][key_count]           logits in log2 units, or products
//   [kObservedQueries][pieces of keys][2]   each piece's maximum and sum of 2^(x - maximum)
#pragma once

#include <cstdint>

#include "kernels/cuda/common/fragment.h"
#include "kernels/cuda/common/target.h"
#include "kernels/cuda/common/tuning.h"

namespace tessera::kernels::cuda {

static_assert(kObservedQueries % kTileColumns == 0);
static_assert(kObserveAhead * kTileColumns == kWarp, "one lane per key and query");
inline constexpr std::uint32_t kObserveWarps = kObserveThreads / kWarp;
// Shared memory of the products kernel: maximum and sum per warp and column.
inline constexpr std::uint32_t kObserveSharedBytes = kObserveWarps * kTileColumns * 2 * 4;

// What a block of the sums kernel keeps per query: 24 bytes of shared memory.
struct ObservedQuery {
  std::uint64_t begin;  // the keys that it sees
  std::uint64_t end;
  float maximum;
  float factor;  // 1 / sum
};
static_assert(sizeof(ObservedQuery) == 24);
inline constexpr std::uint32_t kObserveSumsSharedBytes = kObservedQueries * sizeof(ObservedQuery);

TESSERA_HOST_DEVICE constexpr std::uint64_t ObservePieces(std::uint64_t key_count) {
  return (key_count + kObservedKeys - 1) / kObservedKeys;
}
// Limited by the grid's y, which counts pieces.
inline constexpr std::uint64_t kMostObservedKeys = std::uint64_t{65535} * kObservedKeys;

TESSERA_HOST_DEVICE constexpr std::uint64_t ObservedLogitAt(std::uint64_t key_count,
                                                            std::uint32_t query,
                                                            std::uint64_t key) {
  return query * key_count + key;
}
TESSERA_HOST_DEVICE constexpr std::uint64_t ObservedPieceAt(std::uint64_t key_count,
                                                            std::uint32_t query,
                                                            std::uint64_t piece) {
  return kObservedQueries * key_count + (query * ObservePieces(key_count) + piece) * 2;
}
TESSERA_HOST_DEVICE constexpr std::uint64_t ObserveScratchFloats(std::uint64_t key_count) {
  return ObservedPieceAt(key_count, kObservedQueries, 0);
}

}  // namespace tessera::kernels::cuda
