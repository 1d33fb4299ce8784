// Reads one element of a row as a double. Rows lie in a mapping, so no alignment is assumed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/format/element.h"

namespace tessera::kernels {

inline double ElementAt(const std::byte* row, std::size_t index, ElementType type) {
  if (type == ElementType::kFp32) {
    float value;
    std::memcpy(&value, row + index * sizeof(value), sizeof(value));
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, row + index * sizeof(bits), sizeof(bits));
  return type == ElementType::kBf16 ? Bf16ToFloat(bits) : Fp16ToFloat(bits);
}

inline double Dot(const std::byte* a, const std::byte* b, std::size_t count, ElementType type) {
  double sum = 0;
  for (std::size_t i = 0; i < count; ++i) sum += ElementAt(a, i, type) * ElementAt(b, i, type);
  return sum;
}

}  // namespace tessera::kernels
