// Reads and writes single elements of rows in host memory, where speed does not matter.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/format/element.h"

namespace tessera::compaction {

inline float ElementAt(const std::byte* row, kernels::ElementType type, std::uint32_t index) {
  if (type == kernels::ElementType::kFp32) {
    float value;
    std::memcpy(&value, row + index * sizeof value, sizeof value);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, row + index * sizeof bits, sizeof bits);
  return type == kernels::ElementType::kBf16 ? kernels::Bf16ToFloat(bits)
                                             : kernels::Fp16ToFloat(bits);
}

// The largest magnitude that a row may hold.
inline float LargestElement(kernels::ElementType type) {
  return type == kernels::ElementType::kFp16 ? 65504.0f : 0x1.fep62f;
}

// Clamps to the largest magnitude: elements computed from valid rows may exceed it, those of a
// rotated key by up to sqrt(2). `value` must not be NaN.
inline void SetElement(std::byte* row, kernels::ElementType type, std::uint32_t index,
                       float value) {
  value = std::clamp(value, -LargestElement(type), LargestElement(type));
  if (type == kernels::ElementType::kFp32) {
    std::memcpy(row + index * sizeof value, &value, sizeof value);
    return;
  }
  const std::uint16_t bits = type == kernels::ElementType::kBf16 ? kernels::FloatToBf16(value)
                                                                 : kernels::FloatToFp16(value);
  std::memcpy(row + index * sizeof bits, &bits, sizeof bits);
}

}  // namespace tessera::compaction
