// How the sign bits of a tile's keys (kernels/format/planes.h) become tensor-core operands: by a
// rotation and masks. A warp has a tile, 32 rows; lane l's rows are those of quad l / 4.
//
//   product p of m16n8k32, u8 x s8     row g is row 2 p of quad g, row g + 8 is row 2 p + 1
//
// So the four lanes of a quad have the products of all its rows in their own registers, two columns
// each. A step of the sum is one word of a row, 32 channels: lane t of the four has bits t and t +
// 4 of every byte. An operand's byte is 2 where the bit is set, and accumulators begin at minus the
// sum of the query's codes, so that they end as the sum of +-code.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/cuda/common/target.h"
#include "kernels/format/tile_shape.h"

namespace tessera::kernels::cuda {

inline constexpr std::uint32_t kSignBits = 0x02020202u;

// 32-bit words of a row's signs.
TESSERA_HOST_DEVICE constexpr std::uint32_t SignWords(std::uint32_t head_dim) {
  return SignBytes(head_dim) / 4;
}

// By how much a word is rotated to the left for a lane: bit t of every byte becomes bit 1, bit
// t + 4 becomes bit 5.
TESSERA_HOST_DEVICE constexpr std::uint32_t SignTurn(std::uint32_t lane) {
  return (1 - lane % 4) & 31;
}

// The A operand of turned words of the rows g and g + 8.
struct SignOperand {
  std::uint32_t a[4];
};
TESSERA_HOST_DEVICE constexpr SignOperand SignOperandOf(std::uint32_t low, std::uint32_t high) {
  return {{low & kSignBits, high & kSignBits, low >> 4 & kSignBits, high >> 4 & kSignBits}};
}

// Register r of the query operand of word `word`: `codes` are the channels of that word, four in
// each of its eight 32-bit words.
TESSERA_HOST_DEVICE constexpr std::uint32_t SignQuery(const std::uint32_t (&codes)[8],
                                                      std::uint32_t lane, std::uint32_t r) {
  std::uint32_t operand = 0;
  for (std::uint32_t j = 0; j < 4; ++j) {
    operand |= (codes[2 * j + r] >> (8 * (lane % 4)) & 0xff) << (8 * j);
  }
  return operand;
}

// Accumulators are integers that are read as floats: kSignZero is the bits of 1.5 x 2^23, so that
// adding n to the bits adds n to the float.
inline constexpr std::int32_t kSignZero = 0x4b400000;
inline constexpr float kSignZeroValue = 12582912;
static_assert(2 * 127 * 128 < 1 << 22);

// Whether a tile's summaries are signs, so that queries and keys are rotated for them.
TESSERA_HOST_DEVICE constexpr bool HasSigns(const TileShape& shape) {
  return shape.summary == Summary::kSigns;
}

// Where a tile's norms are among its summaries; the bits are first.
TESSERA_HOST_DEVICE constexpr std::uint32_t NormsAt(std::uint32_t head_dim) {
  return kTileEntries * SignBytes(head_dim);
}
static_assert(LayoutOf(WithSigns(DenseShape(64, ElementType::kBf16))).block_data == NormsAt(64));
static_assert(LayoutOf(WithSigns(DenseShape(256, ElementType::kBf16))).block_data == NormsAt(256));

// The byte for a norm: the mean of a key's magnitudes. Byte k stands for 2^(k / 8 - 16).
TESSERA_HOST_DEVICE inline std::uint32_t NormByte(float mean) {
  if (!(mean > 0)) return 0;
  const float k = ::rintf((::log2f(mean) + 16) * 8);
  return k < 1 ? 1 : (k > 255 ? 255 : static_cast<std::uint32_t>(k));
}
}  // namespace tessera::kernels::cuda
