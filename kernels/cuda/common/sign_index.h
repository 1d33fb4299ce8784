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

// A row's word as the lane needs it: bit t of every byte becomes bit 1, bit t + 4 becomes bit 5.
TESSERA_HOST_DEVICE constexpr std::uint32_t TurnSigns(std::uint32_t word, std::uint32_t lane) {
  const std::uint32_t t = lane % 4;
  return (word << ((1 - t) & 31)) | (word >> ((t - 1) & 31));
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

// The byte for a norm: the mean of a key's magnitudes.
TESSERA_HOST_DEVICE inline std::uint32_t NormByte(float mean) {
  if (!(mean > 0)) return 0;
  const float k = ::rintf((::log2f(mean) + 16) * 8);
  return k < 1 ? 1 : (k > 255 ? 255 : static_cast<std::uint32_t>(k));
}
// The norm that a byte of the index stands for.
TESSERA_HOST_DEVICE constexpr float NormOf(std::uint32_t k) {
  constexpr float kEighths[8] = {1.0f,        1.09050773f, 1.18920712f, 1.29683955f,
                                 1.41421356f, 1.54221083f, 1.68179283f, 1.83400809f};
  if (k == 0) return 0;
  float scale = 0x1p-16f;
  for (std::uint32_t i = 0; i < k / 8; ++i) scale *= 2;
  return scale * kEighths[k % 8];
}

}  // namespace tessera::kernels::cuda
