// One stored row of a tile, dense or packed, read element by element.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/format/element.h"
#include "kernels/format/tile_shape.h"
#include "kernels/reference/scalar.h"

namespace tessera::kernels {

inline constexpr std::uint32_t kMaxChannels = 256;

// Where a stored row lies, and what it means.
struct StoredRow {
  bool packed;             // else a plain row of `elements`
  const std::byte* bits;   // null: every channel is stored
  const std::byte* scale;  // null: none
  const std::byte* data;
  ElementType elements;  // of plain rows
  ValueType values;      // of packed rows
  std::uint32_t channels;
  std::uint32_t group;
  std::uint32_t kept;  // values stored of a packed row
};

StoredRow KeyRow(const TileShape& shape, const TileLayout& layout, const std::byte* tile,
                 std::uint32_t row);
StoredRow ValueRow(const TileShape& shape, const TileLayout& layout, const std::byte* tile,
                   std::uint32_t row);
// The mean key of a block: `channels` of them. Of kMinMax: 2 x `channels`, all minima first.
StoredRow BlockRow(const TileShape& shape, const TileLayout& layout, const std::byte* summaries,
                   std::uint32_t block);

// Writes the row's `channels` elements, dropped ones as 0. Exact. Where a bitmap names more
// channels than the row has values (memory reused under a revoked reader) nothing behind the row is
// read.
void ReadRow(const StoredRow& row, double* elements);

// The weight of an entry; 1 where the tile has none.
double WeightOf(const TileShape& shape, const TileLayout& layout, const std::byte* tile,
                std::uint32_t row);

// The position of a row, where `first` is what the tile's words count from, or else the position of
// row 0.
std::uint64_t PositionOf(const TileShape& shape, const TileLayout& layout, const std::byte* tile,
                         std::uint64_t first, std::uint32_t row);

}  // namespace tessera::kernels
