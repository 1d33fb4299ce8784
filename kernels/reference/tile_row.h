// Reads one stored row of a tile, dense or packed, element by element.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/format/element.h"
#include "kernels/format/tile_shape.h"
#include "kernels/reference/scalar.h"

namespace tessera::kernels {

inline constexpr std::uint32_t kMaxChannels = 256;

// The location and encoding of a stored row.
struct StoredRow {
  bool packed;             // otherwise a dense row of `elements`
  const std::byte* bits;   // null: every channel is stored
  const std::byte* scale;  // null: none
  const std::byte* data;
  ElementType elements;  // of dense rows
  ValueType values;      // of packed rows
  std::uint32_t channels;
  std::uint32_t group;
  std::uint32_t kept;  // stored values of a packed row
};

StoredRow KeyRow(const TileShape& shape, const TileLayout& layout, const std::byte* tile,
                 std::uint32_t row);
StoredRow ValueRow(const TileShape& shape, const TileLayout& layout, const std::byte* tile,
                   std::uint32_t row);
// The mean key of a block (`channels` values), or for kMinMax 2 x `channels` values, minima first.
StoredRow BlockRow(const TileShape& shape, const TileLayout& layout, const std::byte* summaries,
                   std::uint32_t block);

// The elements of a tile's row in the space it is stored in, of any format.
void ReadKey(const TileShape& shape, const TileLayout& layout, const std::byte* tile,
             std::uint32_t row, double* elements);
void ReadValue(const TileShape& shape, const TileLayout& layout, const std::byte* tile,
               std::uint32_t row, double* elements);

// Writes the row's `channels` elements exactly, dropped ones as 0. Never reads past the row, even
// if the bitmap names more channels than the row has values: a revoked reader may see reused
// memory.
void ReadRow(const StoredRow& row, double* elements);

// The weight of an entry; 1 if the tile has no weights.
double WeightOf(const TileShape& shape, const TileLayout& layout, const std::byte* tile,
                std::uint32_t row);

// The position of a row. `first` is the base of the tile's position words, or the position of row 0
// if it has none.
std::uint64_t PositionOf(const TileShape& shape, const TileLayout& layout, const std::byte* tile,
                         std::uint64_t first, std::uint32_t row);

}  // namespace tessera::kernels
