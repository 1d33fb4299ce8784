// Operations on stored rows: decoding, gathering into a new tile. Also the moments of rows that are
// not in tiles.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/encode/encode_planes.cuh"
#include "kernels/cuda/encode/encode_row.cuh"
#include "kernels/cuda/encode/encode_summary.cuh"
#include "kernels/cuda/encode/tile_ops_params.h"

namespace tessera::kernels::cuda {

// Grid: jobs, 2 (K rows, V rows). One warp per row.
TESSERA_DEVICE void DecodeTile(const DecodeTilesParams& params) {
  const DecodeTileJob job = params.jobs[gpu::BlockX()];
  const DeviceStrategy& strategy = params.strategies[job.strategy];
  const TileShape shape = strategy.shape;
  const bool of_value = gpu::BlockY() == 1;
  const TileRows rows = of_value ? TileRows::kValue : TileRows::kKey;
  const RowArrays arrays = ArraysOf(strategy.layout, rows);
  const std::uint32_t width = PaddedChannels(shape);
  auto* output = reinterpret_cast<float*>(of_value ? job.values : job.keys);
  // The tile is only read; PlaceOf also serves writers and takes a mutable pointer.
  auto* tile = reinterpret_cast<std::byte*>(job.tile);
  for (std::uint32_t r = gpu::Warp(); r < job.rows; r += gpu::Threads() / kWarp) {
    if (shape.planes()) {
      ReadQuadRow(strategy, of_value, tile, r, output + std::uint64_t{r} * width);
      continue;
    }
    ReadStoredRow(shape, ShapeOf(shape, rows), PlaceOf(tile, arrays, r), width,
                  output + std::uint64_t{r} * width);
  }
}

template <class Word>
TESSERA_DEVICE void CopyWords(std::byte* to, const std::byte* from, std::uint32_t bytes) {
  for (std::uint32_t i = gpu::Lane(); i < bytes / sizeof(Word); i += kWarp) {
    reinterpret_cast<Word*>(to)[i] = reinterpret_cast<const Word*>(from)[i];
  }
}

// Copies with one warp, in the widest words that address and length allow.
TESSERA_DEVICE void CopyBytes(std::byte* to, const std::byte* from, std::uint32_t bytes) {
  const std::uint64_t all =
      reinterpret_cast<std::uint64_t>(to) | reinterpret_cast<std::uint64_t>(from) | bytes;
  if (all % sizeof(gpu::Chunk) == 0) {
    CopyWords<gpu::Chunk>(to, from, bytes);
  } else if (all % sizeof(std::uint32_t) == 0) {
    CopyWords<std::uint32_t>(to, from, bytes);
  } else {
    CopyWords<std::byte>(to, from, bytes);
  }
}

TESSERA_DEVICE void CopyStoredRow(const RowArrays& to_arrays, std::byte* to, std::uint32_t to_row,
                                  const RowArrays& from_arrays, std::byte* from,
                                  std::uint32_t from_row) {
  const RowPlace target = PlaceOf(to, to_arrays, to_row);
  const RowPlace source = PlaceOf(from, from_arrays, from_row);
  CopyBytes(target.bits, source.bits, to_arrays.row.bits);
  CopyBytes(target.scale, source.scale, to_arrays.row.scale);
  CopyBytes(target.data, source.data, to_arrays.row.data);
}

// Stores the words of the new tile's row r. `source` is null after the last row.
TESSERA_DEVICE void StoreGatheredWords(const DeviceStrategy& from, const DeviceStrategy& to,
                                       const GatherRow* source, std::byte* tile, std::uint32_t r) {
  if (to.shape.weights) {
    float weight = source != nullptr ? 1.0f : 0.0f;
    if (source != nullptr && from.shape.weights) {
      weight = reinterpret_cast<const float*>(source->tile + from.layout.weights)[source->row];
    }
    reinterpret_cast<float*>(tile + to.layout.weights)[r] = weight;
  }
  if (to.shape.positions) {
    reinterpret_cast<std::uint32_t*>(tile + to.layout.positions)[r] =
        source != nullptr ? source->position : 0;
  }
}

// Gathers rows of planes: their codes, then the words of four of them at a time.
template <class Shape>
TESSERA_DEVICE void GatherQuads(const DeviceStrategy& from, const DeviceStrategy& to,
                                const GatherRow* rows, std::uint32_t count, float* scratch,
                                std::byte* tile) {
  for (std::uint32_t q = gpu::Warp(); q < kTileQuads; q += Shape::kWarps) {
    std::byte* quad = tile + q * to.layout.quad.bytes;
    TESSERA_NO_UNROLL
    for (std::uint32_t side = 0; side < 2; ++side) {
      CopyQuadCodes<Shape>(from, to, side == 1, rows, count, q, scratch, quad);
      gpu::SyncWarp();
      StoreQuadWords<Shape>(to, side == 1, q, scratch, quad);
      gpu::SyncWarp();  // before the next side's codes
    }
  }
}

// Copies the signs of the rows from the indexes of their tiles, with zeros after the last one. One
// warp per row.
TESSERA_DEVICE void GatherSigns(const DeviceStrategy& from, const DeviceStrategy& to,
                                const GatherRow* rows, std::uint32_t count, std::byte* summaries) {
  const std::uint32_t bytes = SignBytes(to.shape.head_dim);
  for (std::uint32_t r = gpu::Warp(); r < kTileEntries; r += gpu::Threads() / kWarp) {
    const bool live = r < count;
    const std::byte* bits =
        live ? rows[r].summaries + from.layout.block_bits + rows[r].row * bytes : nullptr;
    if (gpu::Lane() < bytes) {
      summaries[to.layout.block_bits + r * bytes + gpu::Lane()] =
          live ? bits[gpu::Lane()] : std::byte{0};
    }
    if (gpu::Lane() != 0) continue;
    summaries[to.layout.block_data + r] =
        live ? rows[r].summaries[from.layout.block_data + rows[r].row] : std::byte{0};
  }
}

// Grid: jobs.
template <std::uint32_t kHeadDim>
TESSERA_DEVICE void GatherTileRows(const GatherTilesParams& params) {
  using Shape = EncodeShape<kHeadDim>;
  const GatherTileJob job = params.jobs[gpu::BlockX()];
  const DeviceStrategy& from = params.strategies[job.from];
  const DeviceStrategy& to = params.strategies[job.to];
  const TileShape shape = to.shape;
  const GatherRow* rows = params.rows + job.first_row;
  auto* tile = reinterpret_cast<std::byte*>(job.tile);
  auto* keys = reinterpret_cast<float*>(gpu::SharedMemory());
  const RowArrays from_keys = ArraysOf(from.layout, TileRows::kKey);
  const RowArrays from_values = ArraysOf(from.layout, TileRows::kValue);
  const RowArrays to_keys = ArraysOf(to.layout, TileRows::kKey);
  const RowArrays to_values = ArraysOf(to.layout, TileRows::kValue);
  if (gpu::Thread() < kTileEntries) {
    const std::uint32_t r = gpu::Thread();
    StoreGatheredWords(from, to, r < job.row_count ? rows + r : nullptr, tile, r);
  }
  auto* summaries = reinterpret_cast<std::byte*>(job.summaries);
  if (HasSigns(shape)) GatherSigns(from, to, rows, job.row_count, summaries);
  if (shape.planes()) return GatherQuads<Shape>(from, to, rows, job.row_count, keys, tile);
  for (std::uint32_t r = gpu::Warp(); r < job.row_count; r += Shape::kWarps) {
    auto* source = const_cast<std::byte*>(rows[r].tile);
    CopyStoredRow(to_keys, tile, r, from_keys, source, rows[r].row);
    CopyStoredRow(to_values, tile, r, from_values, source, rows[r].row);
    if (shape.summary == Summary::kNone || HasSigns(shape)) continue;
    ReadStoredRow(shape, shape.key, PlaceOf(source, from_keys, rows[r].row), PaddedChannels(shape),
                  keys + r * Shape::kRowFloats);
  }
  ZeroUnusedRows(tile, to_keys, job.row_count, kTileEntries);
  ZeroUnusedRows(tile, to_values, job.row_count, kTileEntries);
  if (HasSigns(shape)) return;
  gpu::SyncBlock();
  StoreSummaries<Shape>(shape, to.layout, summaries, job.row_count, keys);
}

// Grid: jobs, MomentsSquares(head_dim). A thread sums four elements of one column in row order and
// in double, where products of fp32 elements are exact. So the bits match the reference.
TESSERA_DEVICE void SumMoments(const MomentsTilesParams& params) {
  constexpr std::uint32_t kSide = kMomentsSide;
  constexpr std::uint32_t kStep = kMomentsThreads / kSide;
  constexpr std::uint32_t kSums = kSide / kStep;
  const MomentsTileJob job = params.jobs[gpu::BlockX()];
  const MomentsSquare square = MomentsSquareAt(params.head_dim, gpu::BlockY());
  auto* left = reinterpret_cast<double*>(gpu::SharedMemory());  // [row][channel of square.row]
  double* right = left + kMomentsRows * kSide;                  // [row][channel of square.column]
  const auto* rows = reinterpret_cast<const std::byte*>(job.rows);
  const std::uint32_t j = gpu::Thread() % kSide;
  const std::uint32_t i = gpu::Thread() / kSide;
  double* target = reinterpret_cast<double*>(job.sums) +
                   (square.row * kSide + i) * params.head_dim + square.column * kSide + j;
  const auto above = [&](std::uint32_t k) {
    return square.row < square.column || i + k * kStep <= j;
  };
  double sums[kSums];
  TESSERA_UNROLL
  for (std::uint32_t k = 0; k < kSums; ++k) {
    sums[k] = above(k) ? target[k * kStep * params.head_dim] : 0;
  }
  for (std::uint64_t first = 0; first < job.row_count; first += kMomentsRows) {
    const std::uint64_t rest = job.row_count - first;
    const std::uint32_t count =
        rest < kMomentsRows ? static_cast<std::uint32_t>(rest) : kMomentsRows;
    for (std::uint32_t r = i; r < count; r += kStep) {
      const std::byte* row = rows + (first + r) * job.stride;
      left[r * kSide + j] = LoadElementOf(params.type, row, square.row * kSide + j);
      right[r * kSide + j] = LoadElementOf(params.type, row, square.column * kSide + j);
    }
    gpu::SyncBlock();
    for (std::uint32_t r = 0; r < count; ++r) {
      TESSERA_UNROLL
      for (std::uint32_t k = 0; k < kSums; ++k) {
        sums[k] += left[r * kSide + i + k * kStep] * right[r * kSide + j];
      }
    }
    gpu::SyncBlock();  // before the next rows overwrite these
  }
  TESSERA_UNROLL
  for (std::uint32_t k = 0; k < kSums; ++k) {
    if (above(k)) target[k * kStep * params.head_dim] = sums[k];
  }
}

}  // namespace tessera::kernels::cuda
