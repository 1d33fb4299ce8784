// Arithmetic on single rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/format/element.h"

namespace tessera::kernels {

// |x|^2 of a row of `head_dim` elements, which may be unaligned.
inline double SquaredLength(const std::byte* row, std::uint32_t head_dim, ElementType type) {
  double sum = 0;
  for (std::size_t i = 0; i < head_dim; ++i) {
    float element;
    if (type == ElementType::kFp32) {
      std::memcpy(&element, row + i * sizeof(element), sizeof(element));
    } else {
      std::uint16_t bits;
      std::memcpy(&bits, row + i * sizeof(bits), sizeof(bits));
      element = type == ElementType::kBf16 ? Bf16ToFloat(bits) : Fp16ToFloat(bits);
    }
    sum += double{element} * element;
  }
  return sum;
}

}  // namespace tessera::kernels
