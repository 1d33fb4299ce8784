// Encodes a tile: rotates, checks, selects channels, quantises and summarises. Two blocks of
// threads per tile: one for the K rows (with summaries, weights and positions), one for the V rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/encode/encode_planes.cuh"
#include "kernels/cuda/encode/encode_rotate.cuh"
#include "kernels/cuda/encode/encode_summary.cuh"
#include "kernels/cuda/encode/tile_ops_params.h"

namespace tessera::kernels::cuda {

TESSERA_DEVICE RotateSource SourceOf(const EncodeTileJob& job, const DeviceStrategy& strategy,
                                     ElementType type, bool of_value) {
  // Dense rows are stored as they are. Keys with signs are rotated for these.
  const bool signs = HasSigns(strategy.shape) && !of_value;
  const std::uint64_t rotation = !strategy.shape.packed() && !signs ? 0
                                 : of_value                         ? strategy.value_rotation
                                                                    : strategy.key_rotation;
  return {.rows = reinterpret_cast<const std::byte*>(of_value ? job.value : job.key),
          .stride = job.stride,
          .rotation = reinterpret_cast<const std::byte*>(rotation),
          .mean = !strategy.shape.planes() && !signs
                      ? nullptr
                      : reinterpret_cast<const std::byte*>(of_value ? strategy.value_mean
                                                                    : strategy.key_mean),
          .row_count = job.rows,
          .channels = of_value ? strategy.shape.value.channels : strategy.shape.key.channels,
          .type = type,
          .rotation_type = strategy.rotation_type,
          .unstorable_bits = UnstorableBits(strategy.shape)};
}

// Copies dense rows unchanged.
TESSERA_DEVICE void StoreDenseRows(const RotateSource& source, const RowArrays& arrays,
                                   std::byte* tile) {
  const std::uint32_t chunks = arrays.row.data / sizeof(gpu::Chunk);
  for (std::uint32_t i = gpu::Thread(); i < source.row_count * chunks; i += gpu::Threads()) {
    const std::uint32_t row = i / chunks;
    const std::uint32_t chunk = i % chunks;
    reinterpret_cast<gpu::Chunk*>(tile + arrays.data + row * arrays.row.data)[chunk] =
        reinterpret_cast<const gpu::Chunk*>(source.rows + row * source.stride)[chunk];
  }
}

// Stores the tile's rows, packed or dense, and zeros after them. If `keep` is set, `rotated`
// afterwards holds the packed rows as they are stored.
template <class Shape>
TESSERA_DEVICE void StoreRows(const DeviceStrategy& strategy, TileRows rows,
                              const RotateSource& source, std::byte* tile, float* rotated,
                              bool keep) {
  const RowArrays arrays = ArraysOf(strategy.layout, rows);
  if (strategy.shape.packed()) {
    const RowShape shape = ShapeOf(strategy.shape, rows);
    for (std::uint32_t r = gpu::Warp(); r < source.row_count; r += Shape::kWarps) {
      PackRow<Shape::kHeadDim>(strategy.shape, shape, rotated + r * Shape::kRowFloats,
                               arrays.row.bits, PlaceOf(tile, arrays, r), keep);
    }
  } else {
    StoreDenseRows(source, arrays, tile);
  }
  ZeroUnusedRows(tile, arrays, source.row_count, kTileEntries);
}

// Stores weights and positions, and zeros after the last row.
TESSERA_DEVICE void StoreJobWords(const EncodeTileJob& job, const TileShape& shape,
                                  const TileLayout& layout, std::byte* tile) {
  const std::uint32_t row = gpu::Thread();
  if (row >= kTileEntries) return;
  const bool live = row < job.rows;
  if (shape.weights) {
    float weight = live ? 1.0f : 0.0f;
    if (live && job.weights != 0) weight = reinterpret_cast<const float*>(job.weights)[row];
    reinterpret_cast<float*>(tile + layout.weights)[row] = weight;
  }
  if (shape.positions) {
    std::uint32_t position = live ? row : 0;
    if (live && job.positions != 0) {
      position = reinterpret_cast<const std::uint32_t*>(job.positions)[row];
    }
    reinterpret_cast<std::uint32_t*>(tile + layout.positions)[row] = position;
  }
}

// Grid: jobs, 2.
template <std::uint32_t kHeadDim>
TESSERA_DEVICE void EncodeTile(const EncodeTilesParams& params) {
  using Shape = EncodeShape<kHeadDim>;
  const EncodeTileJob job = params.jobs[gpu::BlockX()];
  const DeviceStrategy& strategy = params.strategies[job.strategy];
  const TileShape shape = strategy.shape;
  const TileLayout& layout = strategy.layout;
  const bool of_value = gpu::BlockY() == 1;
  auto* rotated = reinterpret_cast<float*>(gpu::SharedMemory());
  auto* flag = reinterpret_cast<std::uint32_t*>(gpu::SharedMemory() + Shape::kFlagOffset);
  if (gpu::Thread() == 0) *flag = 0;
  gpu::SyncBlock();
  const RotateSource source = SourceOf(job, strategy, params.type, of_value);
  const bool bad = RotateRows<Shape>(source, rotated);
  if (gpu::Ballot(bad) != 0 && gpu::Lane() == 0) *flag = 1;
  gpu::SyncBlock();
  if (*flag != 0) {  // every thread of the block reads the same value
    if (gpu::Thread() == 0) gpu::AtomicMin(params.unusable, gpu::BlockX());
    return;
  }
  auto* tile = reinterpret_cast<std::byte*>(job.tile);
  auto* summaries = reinterpret_cast<std::byte*>(job.summaries);
  if (shape.planes()) {
    if (HasSigns(shape) && !of_value) {
      StoreSigns<Shape>(layout, summaries, job.rows, rotated);
      gpu::SyncBlock();  // before codes take the place of the rows
    }
    const bool refused = StoreQuads<Shape>(strategy, of_value, job.rows, rotated, tile);
    if (gpu::Ballot(refused) != 0 && gpu::Lane() == 0) {
      gpu::AtomicMin(params.unusable, gpu::BlockX());
    }
    if (!of_value) StoreJobWords(job, shape, layout, tile);
    return;
  }
  StoreRows<Shape>(strategy, of_value ? TileRows::kValue : TileRows::kKey, source, tile, rotated,
                   !of_value && shape.summary == Summary::kMinMax);
  if (of_value) return;
  StoreJobWords(job, shape, layout, tile);
  gpu::SyncBlock();  // `rotated` holds the stored rows, and no thread reads the old ones any more
  StoreSummaries<Shape>(shape, layout, summaries, job.rows, rotated);
}

}  // namespace tessera::kernels::cuda
