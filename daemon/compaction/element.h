// Single elements of rows in host memory, where speed does not matter.
#pragma once

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

inline void SetElement(std::byte* row, kernels::ElementType type, std::uint32_t index,
                       float value) {
  if (type == kernels::ElementType::kFp32) {
    std::memcpy(row + index * sizeof value, &value, sizeof value);
    return;
  }
  const std::uint16_t bits = type == kernels::ElementType::kBf16 ? kernels::FloatToBf16(value)
                                                                 : kernels::FloatToFp16(value);
  std::memcpy(row + index * sizeof bits, &bits, sizeof bits);
}

}  // namespace tessera::compaction
