// Where an observation's blocks of threads find and put things. Shared by the kernels and by the
// host that launches them; tested on the host against plain loops.
//
// Queries are taken kObservedQueries at a time. The scratch of a job, in floats:
//   [kObservedQueries][key_count]           logits in units of log2, or products
//   [kObservedQueries][pieces of keys][2]   each piece's maximum and sum of 2^(x - maximum)
#pragma once

#include <cstdint>

#include "kernels/cuda/common/fragment.h"
#include "kernels/cuda/common/target.h"
#include "kernels/cuda/common/tuning.h"

namespace tessera::kernels::cuda {

static_assert(kObservedQueries % kTileColumns == 0);
static_assert(kObserveAhead * kTileColumns == kWarp, "a lane per key and query");
inline constexpr std::uint32_t kObserveWarps = kObserveThreads / kWarp;
// Shared memory of the products: maximum and sum of each warp and column.
inline constexpr std::uint32_t kObserveSharedBytes = kObserveWarps * kTileColumns * 2 * 4;

// What a block of threads that adds shares knows of a query: 24 bytes of shared memory.
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
// The y of a grid counts pieces.
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
