// Computes the summaries of a tile's blocks from key rows in shared memory, and zeroes unused
// bytes. All functions are block-collective.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/common/sign_index.h"
#include "kernels/cuda/encode/encode_row.cuh"

namespace tessera::kernels::cuda {

TESSERA_DEVICE void ZeroBytes(std::byte* at, std::uint32_t bytes) {
  for (std::uint32_t i = gpu::Thread(); i < bytes; i += gpu::Threads()) at[i] = std::byte{0};
}

// Zeroes rows [used, rows) of a set of rows. `from` is the address that the arrays' offsets start
// at.
TESSERA_DEVICE void ZeroUnusedRows(std::byte* from, const RowArrays& arrays, std::uint32_t used,
                                   std::uint32_t rows) {
  const RowPlace first = PlaceOf(from, arrays, used);
  ZeroBytes(first.bits, (rows - used) * arrays.row.bits);
  ZeroBytes(first.scale, (rows - used) * arrays.row.scale);
  ZeroBytes(first.data, (rows - used) * arrays.row.data);
}

TESSERA_DEVICE void StoreElementOf(ElementType type, std::byte* row, std::uint32_t index,
                                   float value) {
  if (type == ElementType::kFp32) {
    reinterpret_cast<float*>(row)[index] = value;
    return;
  }
  reinterpret_cast<std::uint16_t*>(row)[index] =
      type == ElementType::kBf16 ? FloatToBf16(value) : FloatToFp16(value);
}

// Returns the largest bf16 that is not above `value`.
TESSERA_HOST_DEVICE constexpr float FloorToBf16(float value) {
  std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const bool exact = (bits & 0xffffu) == 0;
  bits &= 0xffff0000u;
  if (!exact && (bits >> 31) != 0) bits += 0x10000u;
  return std::bit_cast<float>(bits);
}

// Sums in double and in row order, like the reference. A block's mean replaces its first row; no
// other thread uses that column.
template <class Shape>
TESSERA_DEVICE void AverageBlocks(const TileShape& shape, std::uint32_t rows, float* keys) {
  const std::uint32_t blocks = UsedBlocks(shape, rows);
  for (std::uint32_t i = gpu::Thread(); i < blocks * Shape::kHeadDim; i += Shape::kThreads) {
    const std::uint32_t block = i / Shape::kHeadDim;
    const std::uint32_t channel = i % Shape::kHeadDim;
    if (channel >= shape.key.channels) continue;
    const std::uint32_t count = BlockRows(shape, rows, block);
    float* column = keys + block * shape.block * Shape::kRowFloats + channel;
    double sum = 0;
    for (std::uint32_t e = 0; e < count; ++e) sum += column[e * Shape::kRowFloats];
    *column = static_cast<float>(sum / count);
  }
}

template <class Shape>
TESSERA_DEVICE void StoreMeans(const TileShape& shape, const TileLayout& layout,
                               std::byte* summaries, std::uint32_t rows, float* keys) {
  AverageBlocks<Shape>(shape, rows, keys);
  gpu::SyncBlock();
  const RowArrays arrays = ArraysOf(layout, TileRows::kBlock);
  for (std::uint32_t b = gpu::Warp(); b < UsedBlocks(shape, rows); b += Shape::kWarps) {
    float* mean = keys + b * shape.block * Shape::kRowFloats;
    const RowPlace place = PlaceOf(summaries, arrays, b);
    if (shape.packed()) {
      PackRow<Shape::kHeadDim>(shape, shape.key, mean, arrays.row.bits, place, false);
      continue;
    }
    for (std::uint32_t c = gpu::Lane(); c < shape.key.channels; c += kWarp) {
      StoreElementOf(ElementsOf(shape.format), place.data, c, mean[c]);
    }
  }
}

template <class Shape>
TESSERA_DEVICE void StoreMinMax(const TileShape& shape, const TileLayout& layout,
                                std::byte* summaries, std::uint32_t rows, const float* keys) {
  const ElementType type = MinMaxType(shape);
  const std::uint32_t blocks = UsedBlocks(shape, rows);
  for (std::uint32_t i = gpu::Thread(); i < blocks * Shape::kHeadDim; i += Shape::kThreads) {
    const std::uint32_t block = i / Shape::kHeadDim;
    const std::uint32_t channel = i % Shape::kHeadDim;
    if (channel >= shape.key.channels) continue;
    const float* column = keys + block * shape.block * Shape::kRowFloats + channel;
    float low = *column;
    float high = low;
    for (std::uint32_t e = 1; e < BlockRows(shape, rows, block); ++e) {
      const float element = column[e * Shape::kRowFloats];
      low = element < low ? element : low;
      high = element > high ? element : high;
    }
    low += 0.0f;  // never -0
    high += 0.0f;
    if (shape.packed()) {
      low = FloorToBf16(low);
      high = -FloorToBf16(-high) + 0.0f;
    }
    std::byte* row = summaries + layout.block_data + block * layout.block_row.data;
    StoreElementOf(type, row, channel, low);
    StoreElementOf(type, row, shape.key.channels + channel, high);
  }
}

// The sign index of a key z, with one warp: a ballot over 32 channels is a word of the bits.
template <class Shape>
TESSERA_DEVICE void StoreSignRow(const TileLayout& layout, std::byte* summaries, std::uint32_t row,
                                 const float* z) {
  constexpr std::uint32_t kWords = SignBytes(Shape::kHeadDim) / 4;
  auto* bits = reinterpret_cast<std::uint32_t*>(summaries + layout.block_bits) + row * kWords;
  float sum = 0;
  TESSERA_UNROLL
  for (std::uint32_t w = 0; w < Shape::kHeadDim / kWarp; ++w) {
    const float element = z[w * kWarp + gpu::Lane()];
    sum += Magnitude(element);
    if (w >= kWords) continue;
    const std::uint32_t word = gpu::Ballot(element >= 0);
    if (gpu::Lane() == 0) bits[w] = word;
  }
  TESSERA_UNROLL
  for (std::uint32_t mask = 1; mask < kWarp; mask *= 2) sum += gpu::ShuffleXor(sum, mask);
  const float mean = sum / Shape::kHeadDim;
  if (gpu::Lane() == 0) summaries[layout.block_data + row] = static_cast<std::byte>(NormByte(mean));
}

// `keys` holds the rotated rows.
template <class Shape>
TESSERA_DEVICE void StoreSigns(const TileLayout& layout, std::byte* summaries, std::uint32_t rows,
                               const float* keys) {
  for (std::uint32_t r = gpu::Warp(); r < rows; r += Shape::kWarps) {
    StoreSignRow<Shape>(layout, summaries, r, keys + r * Shape::kRowFloats);
  }
  constexpr std::uint32_t kBytes = SignBytes(Shape::kHeadDim);
  ZeroBytes(summaries + layout.block_bits + rows * kBytes, (kTileEntries - rows) * kBytes);
  ZeroBytes(summaries + layout.block_data + rows, kTileEntries - rows);
}

// `keys` holds the rows before rounding for means and signs, and the rows as stored for min/max; it
// is overwritten. No other thread may still be using it.
template <class Shape>
TESSERA_DEVICE void StoreSummaries(const TileShape& shape, const TileLayout& layout,
                                   std::byte* summaries, std::uint32_t rows, float* keys) {
  if (shape.summary == Summary::kNone) return;
  if (HasSigns(shape)) return StoreSigns<Shape>(layout, summaries, rows, keys);
  if (shape.summary == Summary::kMean) StoreMeans<Shape>(shape, layout, summaries, rows, keys);
  if (shape.summary == Summary::kMinMax) StoreMinMax<Shape>(shape, layout, summaries, rows, keys);
  ZeroUnusedRows(summaries, ArraysOf(layout, TileRows::kBlock), UsedBlocks(shape, rows),
                 shape.blocks());
  const std::uint32_t end = layout.block_data + shape.blocks() * layout.block_row.data;
  ZeroBytes(summaries + end, layout.summary_bytes - end);
}

}  // namespace tessera::kernels::cuda
