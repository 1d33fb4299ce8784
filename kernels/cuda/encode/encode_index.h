// Index arithmetic of the tile operations: the row arrays of a tile, the blocks of threads of an
// encode, the squares of a moments matrix. Shared by the kernels and by the host code that launches
// them. Host tests check it against plain loops.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/common/fragment.h"
#include "kernels/cuda/common/target.h"
#include "kernels/format/tile_shape.h"

namespace tessera::kernels::cuda {

// The three sets of rows of a tile.
enum class TileRows : std::uint32_t { kKey, kValue, kBlock };

// Mean keys have the shape of keys.
TESSERA_HOST_DEVICE constexpr RowShape ShapeOf(const TileShape& shape, TileRows rows) {
  return rows == TileRows::kValue ? shape.value : shape.key;
}

// The arrays of one set of rows: offsets from the tile's first byte (for blocks, from the
// summaries' first byte), and the bytes of one row.
struct RowArrays {
  std::uint32_t bits;
  std::uint32_t scales;
  std::uint32_t data;
  RowBytes row;
};

TESSERA_HOST_DEVICE constexpr RowArrays ArraysOf(const TileLayout& layout, TileRows rows) {
  if (rows == TileRows::kBlock) {
    return {.bits = layout.block_bits,
            .scales = layout.block_scales,
            .data = layout.block_data,
            .row = layout.block_row};
  }
  const bool key = rows == TileRows::kKey;
  return {.bits = key ? layout.key_bits : layout.value_bits,
          .scales = key ? layout.key_scales : layout.value_scales,
          .data = key ? layout.key_data : layout.value_data,
          .row = key ? layout.key_row : layout.value_row};
}

// Number of blocks that hold at least one of the first `rows` rows of a tile, and the number of
// rows in one of them.
TESSERA_HOST_DEVICE constexpr std::uint32_t UsedBlocks(const TileShape& shape, std::uint32_t rows) {
  return shape.block == 0 ? 0 : (rows + shape.block - 1) / shape.block;
}
TESSERA_HOST_DEVICE constexpr std::uint32_t BlockRows(const TileShape& shape, std::uint32_t rows,
                                                      std::uint32_t block) {
  const std::uint32_t behind = rows - block * shape.block;
  return behind < shape.block ? behind : shape.block;
}

// Mask of the lanes below `lane`.
TESSERA_HOST_DEVICE constexpr std::uint32_t LanesBelow(std::uint32_t lane) {
  return (1u << lane) - 1;
}

// Threads and shared memory of one encode or gather:
//   32 rows of rotated elements, fp32 | a word: some element is not finite
// For rotation on tensor cores, the source rows are first stored in the same place, as bf16. Every
// warp computes kWarpChannels channels of all rows in registers, and stores them after all warps
// have read the source. So both fit the 48 KiB that a launch has without opting in.
//
// Rows are padded by eight floats: the lanes of an accumulator store pairs of channels of eight
// rows, and each half of a warp then uses 32 different banks.
template <std::uint32_t kHeadDimValue>
struct EncodeShape {
  static constexpr std::uint32_t kHeadDim = kHeadDimValue;
  static constexpr std::uint32_t kWarps = kHeadDim == 64 ? 4 : 8;
  static constexpr std::uint32_t kThreads = kWarps * kWarp;
  static constexpr std::uint32_t kWarpChannels = kHeadDim / kWarps;
  static constexpr std::uint32_t kColumnTiles = kWarpChannels / kTileColumns;
  static constexpr std::uint32_t kRowTiles = kTileEntries / 16;
  static constexpr std::uint32_t kSteps = kHeadDim / 16;
  static constexpr std::uint32_t kSourceRowBytes = kHeadDim * 2;
  static constexpr std::uint32_t kRowFloats = kHeadDim + 8;
  static constexpr std::uint32_t kFlagOffset = kTileEntries * kRowFloats * 4;
  static constexpr std::uint32_t kSharedBytes = kFlagOffset + 16;
  static_assert(2 * kTileEntries * kSourceRowBytes <= kFlagOffset);
  static_assert(kSharedBytes <= 48 * 1024);
};

// Moments: a block of threads sums one square of the matrix, on or above the diagonal.
inline constexpr std::uint32_t kMomentsSide = 32;
inline constexpr std::uint32_t kMomentsThreads = 256;
// Shared memory: two stripes of kMomentsSide channels of 32 rows, as doubles.
inline constexpr std::uint32_t kMomentsRows = 32;
inline constexpr std::uint32_t kMomentsSharedBytes = 2 * kMomentsRows * kMomentsSide * 8;

TESSERA_HOST_DEVICE constexpr std::uint32_t MomentsSquares(std::uint32_t head_dim) {
  const std::uint32_t side = head_dim / kMomentsSide;
  return side * (side + 1) / 2;
}

struct MomentsSquare {
  std::uint32_t row;  // in squares; row <= column
  std::uint32_t column;
};

// Square `index` of MomentsSquares(head_dim), in row order.
TESSERA_HOST_DEVICE constexpr MomentsSquare MomentsSquareAt(std::uint32_t head_dim,
                                                            std::uint32_t index) {
  const std::uint32_t side = head_dim / kMomentsSide;
  std::uint32_t row = 0;
  while (index >= side - row) {
    index -= side - row;
    ++row;
  }
  return {.row = row, .column = row + index};
}

}  // namespace tessera::kernels::cuda
