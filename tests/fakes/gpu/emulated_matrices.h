// The matrix operations of an emulated warp: `lanes` are its 32 threads, with their arguments and
// results in `operand`.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/format/element.h"

namespace tessera::tests {

inline constexpr std::uint32_t kWarpLanes = 32;

inline std::uint16_t Half(std::uint32_t word, std::uint32_t half) {
  return static_cast<std::uint16_t>(word >> (16 * half));
}

inline float ToFloat(kernels::ElementType type, std::uint16_t bits) {
  return type == kernels::ElementType::kBf16 ? kernels::Bf16ToFloat(bits)
                                             : kernels::Fp16ToFloat(bits);
}

// ldmatrix.x4: row r of matrix m is the 16 bytes at the address from lane 8 m + r. Lane l receives
// elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4, or of column l / 4 if transposed.
template <class Fiber>
void ExecuteLoadMatrices(Fiber* lanes, bool transposed) {
  for (std::uint32_t l = 0; l < kWarpLanes; ++l) {
    for (std::uint32_t m = 0; m < 4; ++m) {
      std::uint32_t word = 0;
      for (std::uint32_t half = 0; half < 2; ++half) {
        const std::uint32_t row = transposed ? l % 4 * 2 + half : l / 4;
        const std::uint32_t column = transposed ? l / 4 : l % 4 * 2 + half;
        std::uint16_t element;
        std::memcpy(&element, lanes[8 * m + row].operand.row + column * 2, 2);
        word |= static_cast<std::uint32_t>(element) << (16 * half);
      }
      lanes[l].operand.fragment[m] = word;
    }
  }
}

// movmatrix.trans: lane l holds elements 2 (l % 4), 2 (l % 4) + 1 of row l / 4.
template <class Fiber>
void ExecuteTranspose(Fiber* lanes) {
  std::uint16_t matrix[8][8];
  for (std::uint32_t l = 0; l < kWarpLanes; ++l) {
    for (std::uint32_t half = 0; half < 2; ++half) {
      matrix[l / 4][l % 4 * 2 + half] =
          Half(static_cast<std::uint32_t>(lanes[l].operand.integer), half);
    }
  }
  for (std::uint32_t l = 0; l < kWarpLanes; ++l) {
    lanes[l].operand.integer =
        matrix[l % 4 * 2][l / 4] | static_cast<std::uint32_t>(matrix[l % 4 * 2 + 1][l / 4]) << 16;
  }
}

// mma.m16n8k16, as in the fragment figures of PTX. g = lane / 4, t = lane % 4:
//   A  element i of 8: row g (g + 8 for i = 2, 3, 6, 7), column 2 t + i % 2 (+ 8 for i >= 4)
//   B  element i of 4: row 2 t + i % 2 (+ 8 for i >= 2), column g
//   C  element i of 4: row g (g + 8 for i >= 2), column 2 t + i % 2
template <class Fiber>
void ExecuteMultiplyAdd(Fiber* lanes) {
  float a[16][16], b[16][8];
  for (std::uint32_t l = 0; l < kWarpLanes; ++l) {
    const auto& operand = lanes[l].operand;
    const std::uint32_t g = l / 4, t = l % 4;
    for (std::uint32_t i = 0; i < 8; ++i) {
      const std::uint32_t row = (i & 2) != 0 ? g + 8 : g;
      const std::uint32_t column = t * 2 + (i & 1) + (i >= 4 ? 8 : 0);
      a[row][column] = ToFloat(operand.type, Half(operand.a[i / 2], i % 2));
    }
    for (std::uint32_t i = 0; i < 4; ++i) {
      b[t * 2 + (i & 1) + (i >= 2 ? 8 : 0)][g] =
          ToFloat(operand.type, Half(operand.b[i / 2], i % 2));
    }
  }
  for (std::uint32_t l = 0; l < kWarpLanes; ++l) {
    for (std::uint32_t i = 0; i < 4; ++i) {
      const std::uint32_t row = i >= 2 ? l / 4 + 8 : l / 4;
      const std::uint32_t column = l % 4 * 2 + (i & 1);
      float sum = lanes[l].operand.c[i];
      for (std::uint32_t k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
      lanes[l].operand.c[i] = sum;
    }
  }
}

// mma.m16n8k32 of u8 by s8, as in the fragment figures of PTX:
//   A  byte i of 16: row g (g + 8 for registers 1 and 3), column 4 t + i % 4 (+ 16 for i >= 8)
//   B  byte i of 8: row 4 t + i % 4 (+ 16 for i >= 4), column g
//   C  as above
template <class Fiber>
void ExecuteMultiplyBytes(Fiber* lanes) {
  std::int32_t a[16][32], b[32][8];
  for (std::uint32_t l = 0; l < kWarpLanes; ++l) {
    const auto& operand = lanes[l].operand;
    const std::uint32_t g = l / 4, t = l % 4;
    for (std::uint32_t i = 0; i < 16; ++i) {
      const std::uint32_t row = i / 4 % 2 != 0 ? g + 8 : g;
      a[row][t * 4 + i % 4 + (i >= 8 ? 16 : 0)] =
          static_cast<std::uint8_t>(operand.a[i / 4] >> (8 * (i % 4)));
    }
    for (std::uint32_t i = 0; i < 8; ++i) {
      b[t * 4 + i % 4 + (i >= 4 ? 16 : 0)][g] =
          static_cast<std::int8_t>(operand.b[i / 4] >> (8 * (i % 4)));
    }
  }
  for (std::uint32_t l = 0; l < kWarpLanes; ++l) {
    for (std::uint32_t i = 0; i < 4; ++i) {
      std::int32_t& sum = lanes[l].operand.sums[i];
      for (std::uint32_t k = 0; k < 32; ++k) {
        sum += a[i >= 2 ? l / 4 + 8 : l / 4][k] * b[k][l % 4 * 2 + (i & 1)];
      }
    }
  }
}

}  // namespace tessera::tests
