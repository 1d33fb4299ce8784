// Stores new K and V rows and checks them for elements that may not be kept.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/gpu.cuh"
#include "kernels/cuda/common/lane_index.h"
#include "kernels/cuda/common/params.h"
#include "kernels/cuda/common/step_view.h"

namespace tessera::kernels::cuda {

// Copies one head's K row and V row into row `tile_row` of a dense tile. Block-collective.
TESSERA_DEVICE void CopyRow(const std::byte* key, const std::byte* value, std::uint32_t row_bytes,
                            std::byte* tile, std::uint32_t tile_row) {
  const std::uint32_t chunks = row_bytes / sizeof(gpu::Chunk);
  for (std::uint32_t i = gpu::Thread(); i < 2 * chunks; i += gpu::Threads()) {
    const bool of_value = i >= chunks;
    const std::uint32_t chunk = of_value ? i - chunks : i;
    const auto* source = reinterpret_cast<const gpu::Chunk*>(of_value ? value : key);
    const std::uint32_t row = tile_row + (of_value ? kTileEntries : 0);
    reinterpret_cast<gpu::Chunk*>(tile + std::uint64_t{row} * row_bytes)[chunk] = source[chunk];
  }
}

// Grid: max_appended x kv_heads, max_batch. If every query head selects its own blocks, a kv head
// has several consecutive lanes that share one place.
TESSERA_DEVICE void AppendRow(const AppendParams& params) {
  const StepReader step(params.step);
  if (!step.Holds(params.layer) || step.header().batch > params.max_batch ||
      step.layer(params.layer).kv_heads % params.kv_heads != 0) {
    if (gpu::Thread() == 0) {
      gpu::AtomicMin(params.fault, FaultWord::Pack(FaultKind::kBadStep, params.layer, 0));
    }
    return;
  }
  const std::uint32_t token = gpu::BlockX() / params.kv_heads;
  const std::uint32_t head = gpu::BlockX() % params.kv_heads;
  if (gpu::BlockY() >= step.header().batch) return;
  const StepSequence& sequence = step.sequence(gpu::BlockY());
  const std::uint32_t lanes = step.layer(params.layer).kv_heads;  // lanes per sequence
  const std::uint32_t lane_index = gpu::BlockY() * lanes + head * (lanes / params.kv_heads);
  if (sequence.appended > params.max_appended && token == 0 && gpu::Thread() == 0) {
    gpu::AtomicMin(params.fault, FaultWord::Pack(FaultKind::kBadStep, params.layer, lane_index));
  }
  if (token >= sequence.appended) return;
  const StepLane& lane = step.lane(params.layer, lane_index);
  const std::uint64_t ordinal = sequence.committed + token;
  if (lane.tail_ring == 0 || ordinal < lane.tail_begin ||
      !RingHolds(lane.tail_begin, ordinal + 1, lane.ring_tiles)) {
    if (gpu::Thread() == 0) {
      gpu::AtomicMin(params.fault, FaultWord::Pack(FaultKind::kBadTail, params.layer, lane_index));
    }
    return;
  }
  const std::uint64_t tile_bytes = std::uint64_t{2} * kTileEntries * params.row_bytes;
  auto* tile = reinterpret_cast<std::byte*>(lane.tail_ring +
                                            RingSlot(ordinal, lane.ring_tiles) * tile_bytes);
  const std::uint64_t source =
      (std::uint64_t{sequence.first_append_row} + token) * params.row_stride +
      std::uint64_t{head} * params.row_bytes;
  CopyRow(params.key + source, params.value + source, params.row_bytes, tile,
          static_cast<std::uint32_t>(ordinal % kTileEntries));
}

// Elements whose magnitude has at least these bits are NaN, infinite or at least 2^63. No finite
// fp16 reaches 2^63.
TESSERA_HOST_DEVICE constexpr std::uint32_t FirstUnusableBits(ElementType type) {
  if (type == ElementType::kBf16) return (127u + 63u) << 7;
  if (type == ElementType::kFp16) return 0x7c00u;
  return (127u + 63u) << 23;
}

TESSERA_HOST_DEVICE constexpr bool WordIsUnusable(ElementType type, std::uint32_t word) {
  const std::uint32_t limit = FirstUnusableBits(type);
  if (type == ElementType::kFp32) return (word & 0x7fffffffu) >= limit;
  return (word & 0x7fffu) >= limit || (word >> 16 & 0x7fffu) >= limit;
}

// Grid: runs.
TESSERA_DEVICE void StoreRun(const StoreRowsParams& params) {
  const RowRun run = params.runs[gpu::BlockX()];
  const std::uint32_t chunks = run.row_bytes / sizeof(gpu::Chunk);
  const std::uint32_t sides = run.value == 0 ? 1 : 2;
  for (std::uint32_t i = gpu::Thread(); i < sides * run.rows * chunks; i += gpu::Threads()) {
    const bool of_value = i >= run.rows * chunks;
    const std::uint32_t at = of_value ? i - run.rows * chunks : i;
    const std::uint32_t row = at / chunks;
    const std::uint32_t chunk = at % chunks;
    const auto* source = reinterpret_cast<const gpu::Chunk*>((of_value ? run.value : run.key) +
                                                             std::uint64_t{row} * run.stride);
    auto* target = reinterpret_cast<gpu::Chunk*>((of_value ? run.value_target : run.key_target) +
                                                 std::uint64_t{row} * run.row_bytes);
    const gpu::Chunk copy = gpu::LoadChunkOnce(source + chunk);
    bool bad = false;
    TESSERA_UNROLL
    for (std::uint32_t w = 0; w < 4; ++w) bad |= WordIsUnusable(params.type, copy.words[w]);
    target[chunk] = copy;
    if (bad) gpu::AtomicMin(params.found, UnusableWord::Pack(gpu::BlockX(), row, of_value));
  }
}

// Grid: at least one thread per word.
TESSERA_DEVICE void StoreWord(const StoreWordsParams& params) {
  const std::uint32_t i = gpu::BlockX() * gpu::Threads() + gpu::Thread();
  if (i >= params.count) return;
  *reinterpret_cast<std::uint64_t*>(params.stores[i].address) = params.stores[i].word;
}

}  // namespace tessera::kernels::cuda
