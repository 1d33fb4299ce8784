// Where the tile operations find and put things: the row arrays of a tile, the blocks of threads of
// an encode, the squares of a moments matrix. Shared by the kernels and by the host that launches
// them; tested on the host against plain loops.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/common/fragment.h"
#include "kernels/cuda/common/target.h"
#include "kernels/format/tile_shape.h"

namespace tessera::kernels::cuda {

// The three sets of rows that a tile has.
enum class TileRows : std::uint32_t { kKey, kValue, kBlock };

// Mean keys are shaped like keys.
TESSERA_HOST_DEVICE constexpr RowShape ShapeOf(const TileShape& shape, TileRows rows) {
  return rows == TileRows::kValue ? shape.value : shape.key;
}

// One set of rows as arrays: offsets from the first byte of the tile, of blocks from that of its
// summaries; and the bytes of one row.
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

// Blocks of a tile that hold at least one of its first `rows` rows, and the rows in one of them.
TESSERA_HOST_DEVICE constexpr std::uint32_t UsedBlocks(const TileShape& shape, std::uint32_t rows) {
  return shape.block == 0 ? 0 : (rows + shape.block - 1) / shape.block;
}
TESSERA_HOST_DEVICE constexpr std::uint32_t BlockRows(const TileShape& shape, std::uint32_t rows,
                                                      std::uint32_t block) {
  const std::uint32_t behind = rows - block * shape.block;
  return behind < shape.block ? behind : shape.block;
}

// Bits of the lanes below `lane`.
TESSERA_HOST_DEVICE constexpr std::uint32_t LanesBelow(std::uint32_t lane) {
  return (1u << lane) - 1;
}

// The threads of one encode or gather, and its shared memory:
//   32 rows of rotated elements, fp32 | a word: some element is not finite
// Before they are rotated on tensor cores, the rows lie in the same place as they came, bf16. Every
// warp rotates into kWarpChannels channels of all rows and keeps them in registers until all have
// read, so that both fit the 48 KiB which a launch has without asking.
//
// Eight floats beyond the row: the lanes of an accumulator store pairs of channels of eight rows,
// and each half of a warp then meets 32 different banks.
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
  static_assert(kTileEntries * kSourceRowBytes <= kFlagOffset);
  static_assert(kSharedBytes <= 48 * 1024);
};

// Moments: a block of threads sums one square of the matrix on or above the diagonal.
inline constexpr std::uint32_t kMomentsSide = 32;
inline constexpr std::uint32_t kMomentsThreads = 256;
// Two stripes of kMomentsSide channels of 32 rows, as doubles.
inline constexpr std::uint32_t kMomentsRows = 32;
inline constexpr std::uint32_t kMomentsSharedBytes = 2 * kMomentsRows * kMomentsSide * 8;

TESSERA_HOST_DEVICE constexpr std::uint32_t MomentsSquares(std::uint32_t head_dim) {
  const std::uint32_t side = head_dim / kMomentsSide;
  return side * (side + 1) / 2;
}

struct MomentsSquare {
  std::uint32_t row;  // in squares; not beyond `column`
  std::uint32_t column;
};

// Square `index` of MomentsSquares(head_dim), row by row.
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
