#include "kernels/reference/tile_row.h"

#include <cstring>

#include "kernels/reference/planes.h"

namespace tessera::kernels {
namespace {

bool BitAt(const std::byte* bits, std::uint32_t index) {
  return (std::to_integer<unsigned>(bits[index / 8]) >> (index % 8) & 1u) != 0;
}

double StoredValue(const StoredRow& row, std::uint32_t index) {
  switch (row.values) {
    case ValueType::kBf16:
      return ElementAt(row.data, index, ElementType::kBf16);
    case ValueType::kFp16:
      return ElementAt(row.data, index, ElementType::kFp16);
    case ValueType::kInt8:
    case ValueType::kFp8:
      return ElementAt(row.scale, 0, ElementType::kBf16) *
             FromScaled(row.values, std::to_integer<std::uint8_t>(row.data[index]));
  }
  return 0;
}

// The offsets of one side's arrays.
struct Arrays {
  std::uint32_t bits;
  std::uint32_t scales;
  std::uint32_t data;
};

StoredRow RowOf(const TileShape& shape, const RowShape& side, const RowBytes& bytes,
                const Arrays& arrays, const std::byte* tile, std::uint32_t row) {
  const bool packed = shape.packed();
  return {.packed = packed,
          .bits = bytes.bits != 0 ? tile + arrays.bits + row * bytes.bits : nullptr,
          .scale = bytes.scale != 0 ? tile + arrays.scales + row * bytes.scale : nullptr,
          .data = tile + arrays.data + row * bytes.data,
          .elements = packed ? ElementType::kBf16 : ElementsOf(shape.format),
          .values = packed ? ValuesOf(shape.format) : ValueType::kBf16,
          .channels = side.channels,
          .group = shape.group,
          .kept = side.kept};
}

}  // namespace

StoredRow KeyRow(const TileShape& shape, const TileLayout& layout, const std::byte* tile,
                 std::uint32_t row) {
  return RowOf(shape, shape.key, layout.key_row,
               {layout.key_bits, layout.key_scales, layout.key_data}, tile, row);
}

StoredRow ValueRow(const TileShape& shape, const TileLayout& layout, const std::byte* tile,
                   std::uint32_t row) {
  return RowOf(shape, shape.value, layout.value_row,
               {layout.value_bits, layout.value_scales, layout.value_data}, tile, row);
}

StoredRow BlockRow(const TileShape& shape, const TileLayout& layout, const std::byte* summaries,
                   std::uint32_t block) {
  if (shape.summary == Summary::kMean) {
    return RowOf(shape, shape.key, layout.block_row,
                 {layout.block_bits, layout.block_scales, layout.block_data}, summaries, block);
  }
  return {.packed = false,
          .bits = nullptr,
          .scale = nullptr,
          .data = summaries + layout.block_data + block * layout.block_row.data,
          .elements = MinMaxType(shape),
          .values = ValueType::kBf16,
          .channels = 2u * shape.key.channels,
          .group = 1,
          .kept = 0};
}

void ReadRow(const StoredRow& row, double* elements) {
  std::uint32_t stored = 0;
  for (std::uint32_t c = 0; c < row.channels; ++c) {
    if (!row.packed) {
      elements[c] = ElementAt(row.data, c, row.elements);
    } else {
      const bool set = row.bits == nullptr || BitAt(row.bits, c / row.group);
      elements[c] = set && stored < row.kept ? StoredValue(row, stored++) : 0.0;
    }
  }
}

void ReadKey(const TileShape& shape, const TileLayout& layout, const std::byte* tile,
             std::uint32_t row, double* elements) {
  if (shape.planes()) return ReadPlanesRow(KeyPlanes(shape, layout), tile, row, elements);
  ReadRow(KeyRow(shape, layout, tile, row), elements);
}

void ReadValue(const TileShape& shape, const TileLayout& layout, const std::byte* tile,
               std::uint32_t row, double* elements) {
  if (shape.planes()) return ReadPlanesRow(ValuePlanes(shape, layout), tile, row, elements);
  ReadRow(ValueRow(shape, layout, tile, row), elements);
}

double WeightOf(const TileShape& shape, const TileLayout& layout, const std::byte* tile,
                std::uint32_t row) {
  return shape.weights ? ElementAt(tile + layout.weights, row, ElementType::kFp32) : 1.0;
}

std::uint64_t PositionOf(const TileShape& shape, const TileLayout& layout, const std::byte* tile,
                         std::uint64_t first, std::uint32_t row) {
  if (!shape.positions) return first + row;
  std::uint32_t word;
  std::memcpy(&word, tile + layout.positions + row * sizeof(word), sizeof(word));
  return first + word;
}

}  // namespace tessera::kernels
