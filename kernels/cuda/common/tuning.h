// The numbers of the CUDA kernels, apart from their code. They come from the arithmetic given
// beside each; MEASURED.md has what an H100 makes of them.
#pragma once

#include <cstdint>

namespace tessera::kernels::cuda {

// Entries of a part: the unit that one block attends over and that merges with others. Part of the
// definition of the result (another value rounds differently), so it is one constant for all GPUs.
// 512 entries of bf16 at head_dim 128 are 256 KiB, about 7 us of one Hopper multiprocessor's share
// of memory bandwidth, far above the cost of starting a part; 8 K entries x 8 kv heads make 128
// parts, about one per multiprocessor; a partial result of 8 columns is 1.6 % of what it
// summarises.
inline constexpr std::uint32_t kSplitEntries = 512;

// Entries of a part of selected blocks; like kSplitEntries part of the definition of the result.
// Half as many: its rows lie apart, so a block waits longer for them, and a selection is
// small: 6.25 % of 128 K entries x 8 kv heads are 256 such parts, two per multiprocessor.
inline constexpr std::uint32_t kSelectedEntries = 256;

// Entries whose blocks one block of threads scores: 64 to 256 block rows, 16 for each warp at once.
// No more than 32 tiles, whose addresses the lanes of a warp hold.
inline constexpr std::uint32_t kScoreEntries = 1024;
inline constexpr std::uint32_t kScoreThreads = 128;
// One block of threads chooses for a lane: 8 K blocks of 16 are 8 for each thread, under way at
// once.
inline constexpr std::uint32_t kSelectThreads = 1024;

// An observation: keys of a piece, the unit that one block of threads multiplies; 64 KiB of bf16 at
// head_dim 128, so that a lane of 8 K keys x 32 queries makes 128 blocks. Of the sums, one thread
// per key.
inline constexpr std::uint32_t kObservedKeys = 256;
inline constexpr std::uint32_t kObserveThreads = 128;
// Keys that a warp has under way: with 8 columns 32 sums, one for each lane.
inline constexpr std::uint32_t kObserveAhead = 4;
// Queries between two launches: scratch of 128 bytes per key, half of a key's bf16 row at 128.
inline constexpr std::uint32_t kObservedQueries = 32;

// Entries that a warp takes through the tensor cores at once: the M of m16n8k16.
inline constexpr std::uint32_t kSliceEntries = 16;
// Query rows (query x head of the group) per tensor-core tile: the N of m16n8k16.
inline constexpr std::uint32_t kTileColumns = 8;

struct MmaTuning {
  std::uint32_t warps;          // each works through its own slices; also shapes the result
  std::uint32_t stages;         // slices in flight per warp, the one computed on included
  std::uint32_t blocks_per_sm;  // what __launch_bounds__ promises
};

// 64 KiB of shared memory per block in each case, so that three blocks fit a multiprocessor of
// sm_90 and sm_100 (228 KiB), two of sm_80 (164 KiB), and one of sm_86, sm_89 and sm_120 (100 KiB).
// Two warps at 256: with four, one block would fill a multiprocessor and leave nothing to overlap.
constexpr MmaTuning MmaTuningFor(std::uint32_t head_dim) {
  if (head_dim == 64) return {.warps = 4, .stages = 4, .blocks_per_sm = 3};
  if (head_dim == 128) return {.warps = 4, .stages = 2, .blocks_per_sm = 3};
  return {.warps = 2, .stages = 2, .blocks_per_sm = 3};
}

struct PackedTuning {
  std::uint32_t warps;
  std::uint32_t stage_bytes;   // of a warp's stages together, where the largest one is no larger
  std::uint32_t most_stages;   // slices in flight per warp, the one computed on included
  std::uint32_t column_tiles;  // of a block, at most
  std::uint32_t blocks_per_sm;
};

// At 25 % a slice of 128 channels is 2.7 KiB, so that four are in flight; where rows keep half of
// them two, and one where they keep all. That takes 51 KiB of a block: four blocks of sm_90. What
// bounds these kernels is how many instructions are ready, hence warps; 128 registers go with it.
// Two column tiles of 256 channels do not fit a thread's registers beside the walks.
constexpr PackedTuning PackedTuningFor(std::uint32_t head_dim) {
  const bool wide = head_dim == 256;
  return {.warps = wide ? 2u : 4u,
          .stage_bytes = wide ? 34u << 10 : (head_dim == 128 ? 12u << 10 : 9u << 10),
          .most_stages = 4,
          .column_tiles = wide ? 1u : 2u,
          .blocks_per_sm = wide ? 3u : 4u};
}

struct FmaTuning {
  std::uint32_t warps;
  std::uint32_t stages;  // whole tiles
  std::uint32_t blocks_per_sm;
};

// At 256 two stages would need 128 KiB for K and V alone. Without a promise of blocks the compiler
// aims for six at 64, and spills.
constexpr FmaTuning FmaTuningFor(std::uint32_t head_dim) {
  return {
      .warps = 4, .stages = head_dim == 256 ? 1u : 2u, .blocks_per_sm = head_dim == 64 ? 4u : 3u};
}

// Blocks launched per multiprocessor, at most: enough that uneven parts even out, few enough that a
// captured launch with little to do ends at once. Does not shape the result.
inline constexpr std::uint32_t kBlocksPerMultiprocessor = 8;

}  // namespace tessera::kernels::cuda
