// Reads the keys of tiles back, as close to the original rows as the tile's form allows. observe
// uses them.
//
//   grid: jobs. The K rows of a tile become fp32 in shared memory. Then a thread per channel
//   rotates them back, x = R^T y (+ mu in planes), eight rows at a time. Neighbouring threads read
//   neighbouring elements of R, and all threads of a warp read the same element of a row
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/encode/encode_planes.cuh"
#include "kernels/cuda/encode/encode_row.cuh"
#include "kernels/cuda/encode/encode_summary.cuh"
#include "kernels/cuda/encode/tile_ops_params.h"

namespace tessera::kernels::cuda {

inline constexpr std::uint32_t kKeysThreads = 256;
// Rows that share one read of an element of R.
inline constexpr std::uint32_t kKeysRows = 8;

// At most 32 KiB, which every launch has.
TESSERA_HOST_DEVICE constexpr std::uint32_t KeysSharedBytes(std::uint32_t head_dim) {
  return kTileEntries * head_dim * static_cast<std::uint32_t>(sizeof(float));
}

// Rotates channel `channel` of kKeysRows rows back.
TESSERA_DEVICE void TurnBack(const DeviceStrategy& strategy, const float* rows,
                             std::uint32_t head_dim, std::uint32_t channel,
                             float (&elements)[kKeysRows]) {
  const auto* rotation = reinterpret_cast<const std::byte*>(strategy.key_rotation);
  for (std::uint32_t c = 0; c < strategy.shape.key.channels; ++c) {
    const float weight = LoadElementOf(strategy.rotation_type, rotation, c * head_dim + channel);
    TESSERA_UNROLL
    for (std::uint32_t r = 0; r < kKeysRows; ++r) {
      elements[r] = FusedMultiplyAdd(weight, rows[r * head_dim + c], elements[r]);
    }
  }
}

TESSERA_DEVICE void KeysOfTile(const KeysTilesParams& params) {
  const KeysTileJob job = params.jobs[gpu::BlockX()];
  const DeviceStrategy& strategy = params.strategies[job.strategy];
  const std::uint32_t head_dim = params.head_dim;
  const RowArrays arrays = ArraysOf(strategy.layout, TileRows::kKey);
  // The tile is only read; PlaceOf also serves writers and takes a mutable pointer.
  auto* tile = reinterpret_cast<std::byte*>(job.tile);
  auto* stored = reinterpret_cast<float*>(gpu::SharedMemory());  // [kTileEntries][head_dim]
  const bool planes = strategy.shape.planes();
  for (std::uint32_t r = gpu::Warp(); r < job.rows; r += gpu::Threads() / kWarp) {
    if (planes) {
      ReadQuadRow(strategy, false, tile, r, stored + r * head_dim);
      continue;
    }
    ReadStoredRow(strategy.shape, strategy.shape.key, PlaceOf(tile, arrays, r), head_dim,
                  stored + r * head_dim);
  }
  gpu::SyncBlock();
  const bool rotated = strategy.shape.packed() && strategy.key_rotation != 0;
  const std::uint32_t row_bytes = head_dim * static_cast<std::uint32_t>(ElementBytes(params.type));
  const std::uint32_t tasks = (job.rows + kKeysRows - 1) / kKeysRows * head_dim;
  for (std::uint32_t task = gpu::Thread(); task < tasks; task += gpu::Threads()) {
    const std::uint32_t channel = task % head_dim;
    const std::uint32_t first = task / head_dim * kKeysRows;
    const float* rows = stored + first * head_dim;
    float elements[kKeysRows] = {};
    // Rows after the last one hold anything, and are not stored.
    if (rotated) TurnBack(strategy, rows, head_dim, channel, elements);
    const float mean =
        planes ? LoadElementOf(ElementType::kBf16,
                               reinterpret_cast<const std::byte*>(strategy.key_mean), channel)
               : -0.0F;  // adds nothing to any number, not even to -0
    TESSERA_UNROLL
    for (std::uint32_t r = 0; r < kKeysRows; ++r) {
      if (first + r >= job.rows) continue;
      auto* key = reinterpret_cast<std::byte*>(job.keys) + (first + r) * row_bytes;
      StoreElementOf(params.type, key, channel,
                     (rotated ? elements[r] : rows[r * head_dim + channel]) + mean);
    }
  }
}

}  // namespace tessera::kernels::cuda
