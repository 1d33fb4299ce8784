// Tuning constants of the CUDA kernels. Each is derived by the arithmetic next to it; MEASURED.md
// has the results on an H100.
#pragma once

#include <cstdint>

#include "kernels/format/planes.h"

namespace tessera::kernels::cuda {

// Entries per part: the unit that one block of threads attends over, and the unit of merging. It is
// part of the definition of the result (another value rounds differently), so it is the same on all
// GPUs. 512 entries of bf16 at head_dim 128 are 256 KiB, about 7 us of one Hopper multiprocessor's
// share of memory bandwidth, far above the cost of starting a part. 8 K entries x 8 kv heads make
// 128 parts, about one per multiprocessor. A partial result of 8 columns is 1.6 % of the data that
// it summarises.
inline constexpr std::uint32_t kSplitEntries = 512;

// Entries per part of selected blocks; also part of the definition of the result. It is half of
// kSplitEntries because the rows are scattered, so a block waits longer for them, and because
// selections are small: 6.25 % of 128 K entries x 8 kv heads are 256 such parts, two per
// multiprocessor.
inline constexpr std::uint32_t kSelectedEntries = 256;

// Entries whose blocks one block of threads scores: 64 to 256 block rows, 16 per warp at once. At
// most 32 tiles, because the lanes of a warp hold the tile addresses.
inline constexpr std::uint32_t kScoreEntries = 1024;
inline constexpr std::uint32_t kScoreThreads = 128;
// One block of threads selects for a lane. With 8 K blocks of 16 entries, each thread loads 8
// blocks at once.
inline constexpr std::uint32_t kSelectThreads = 1024;

// Keys per piece of an observation, the unit that one block of threads multiplies: 64 KiB of bf16
// at head_dim 128. A lane of 8 K keys x 32 queries makes 128 blocks of threads. The sums kernel has
// one thread per key.
inline constexpr std::uint32_t kObservedKeys = 256;
inline constexpr std::uint32_t kObserveThreads = 128;
// Keys that a warp multiplies at once. With 8 columns they make 32 sums, one per lane.
inline constexpr std::uint32_t kObserveAhead = 4;
// Queries per pair of launches: 128 bytes of scratch per key, half of a key's bf16 row at head_dim
// 128.
inline constexpr std::uint32_t kObservedQueries = 32;

// Entries that a warp passes through the tensor cores at once: the M of m16n8k16.
inline constexpr std::uint32_t kSliceEntries = 16;
// Query rows (query x head of the group) per tensor-core tile: the N of m16n8k16.
inline constexpr std::uint32_t kTileColumns = 8;

struct MmaTuning {
  std::uint32_t warps;   // each walks its own slices; also part of the definition of the result
  std::uint32_t stages;  // slices per warp in flight, including the one in use
  std::uint32_t blocks_per_sm;  // the promise of __launch_bounds__
};

// 64 KiB of shared memory per block in each case: three blocks fit a multiprocessor of sm_90 and
// sm_100 (228 KiB), two fit sm_80 (164 KiB), and one fits sm_86, sm_89 and sm_120 (100 KiB). Two
// warps at 256 channels: with four, one block would fill a multiprocessor and leave nothing to
// overlap.
constexpr MmaTuning MmaTuningFor(std::uint32_t head_dim) {
  if (head_dim == 64) return {.warps = 4, .stages = 4, .blocks_per_sm = 3};
  if (head_dim == 128) return {.warps = 4, .stages = 2, .blocks_per_sm = 3};
  return {.warps = 2, .stages = 2, .blocks_per_sm = 3};
}

struct PackedTuning {
  std::uint32_t warps;
  std::uint32_t stage_bytes;   // target for all stages of a warp together; one stage may be larger
  std::uint32_t most_stages;   // slices per warp in flight, at most, including the one in use
  std::uint32_t column_tiles;  // per block, at most
  std::uint32_t blocks_per_sm;
};

// At 25 % of the channels a slice of 128 is 2.7 KiB, so four are in flight; at 50 % two, and at 100
// % one. A block then takes 51 KiB, and four blocks fit sm_90. These kernels are bound by the
// number of ready instructions, hence of warps, so they are limited to 128 registers. Two column
// tiles of 256 channels do not fit a thread's registers together with the walks.
constexpr PackedTuning PackedTuningFor(std::uint32_t head_dim) {
  const bool wide = head_dim == 256;
  return {.warps = wide ? 2u : 4u,
          .stage_bytes = wide ? 34u << 10 : (head_dim == 128 ? 12u << 10 : 9u << 10),
          .most_stages = 4,
          .column_tiles = wide ? 1u : 2u,
          .blocks_per_sm = wide ? 3u : 4u};
}

struct PlanesTuning {
  std::uint32_t warps;
  std::uint32_t stage_bytes;   // all stages of a warp together
  std::uint32_t most_stages;   // tiles per warp in flight, at most, including the one in use
  std::uint32_t column_tiles;  // per block, at most
  std::uint32_t blocks_per_sm;
};

// Room for two tiles of 8 bits, the widest, which is three with K in 6 and 4 bits and V in 4. At
// 128 channels a block takes 67 KiB, so three blocks fit sm_90: twelve warps that each have 10 KiB
// on the way, of the 17 to 20 KiB that a multiprocessor needs in flight.
constexpr PlanesTuning PlanesTuningFor(std::uint32_t head_dim) {
  const bool wide = head_dim == 256;
  return {.warps = wide ? 2u : 4u,
          .stage_bytes = 2 * kTileQuads * QuadLayoutOf(head_dim, {8, 8}, {8, 8}).bytes,
          .most_stages = 3,
          .column_tiles = wide ? 1u : 2u,
          .blocks_per_sm = 3};
}

struct FmaTuning {
  std::uint32_t warps;
  std::uint32_t stages;  // whole tiles in flight
  std::uint32_t blocks_per_sm;
};

// At 256 channels two stages would need 128 KiB for K and V alone. At 64 channels the compiler
// would aim for six blocks and spill without an explicit number.
constexpr FmaTuning FmaTuningFor(std::uint32_t head_dim) {
  return {
      .warps = 4, .stages = head_dim == 256 ? 1u : 2u, .blocks_per_sm = head_dim == 64 ? 4u : 3u};
}

// Maximum number of blocks launched per multiprocessor: enough to balance uneven parts, few enough
// that a captured launch with little work ends quickly. Does not affect the result.
inline constexpr std::uint32_t kBlocksPerMultiprocessor = 8;

}  // namespace tessera::kernels::cuda
