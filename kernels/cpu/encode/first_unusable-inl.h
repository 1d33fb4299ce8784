// Scans for elements that may not be stored in a tile. Written over the including file's `Simd`.
// Internal linkage throughout: see ../README.md.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/simd/always_inline-inl.h"
#include "kernels/format/element.h"

namespace tessera::kernels {
namespace {

// The bit patterns of 2^63; for fp16 of infinity, since its largest finite value is far below 2^63.
// Every unusable element, including NaN, is at least this large as an integer without its sign.
constexpr std::uint16_t kLimitBf16 = 0x5f00;
constexpr std::uint16_t kLimitFp16 = 0x7c00;
constexpr std::uint32_t kLimitFp32 = 0x5f000000;

TESSERA_SIMD std::int64_t FirstWord16(const std::byte* words, std::size_t count,
                                      std::uint16_t limit) {
  constexpr std::size_t kStep = Simd::kVectorBytes / 2;
  std::size_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    const int found = Simd::FirstAtLeast16(words + 2 * i, limit);
    if (found >= 0) return static_cast<std::int64_t>(i) + found;
  }
  for (; i < count; ++i) {
    std::uint16_t word;
    __builtin_memcpy(&word, words + 2 * i, sizeof(word));
    if ((word & 0x7fffu) >= limit) return static_cast<std::int64_t>(i);
  }
  return -1;
}

TESSERA_SIMD std::int64_t FirstWord32(const std::byte* words, std::size_t count,
                                      std::uint32_t limit) {
  constexpr std::size_t kStep = Simd::kVectorBytes / 4;
  std::size_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    const int found = Simd::FirstAtLeast32(words + 4 * i, limit);
    if (found >= 0) return static_cast<std::int64_t>(i) + found;
  }
  for (; i < count; ++i) {
    std::uint32_t word;
    __builtin_memcpy(&word, words + 4 * i, sizeof(word));
    if ((word & 0x7fffffffu) >= limit) return static_cast<std::int64_t>(i);
  }
  return -1;
}

static std::int64_t FirstUnusableSimd(const void* elements, std::size_t count, ElementType type) {
  const auto* words = static_cast<const std::byte*>(elements);
  switch (type) {
    case ElementType::kBf16:
      return FirstWord16(words, count, kLimitBf16);
    case ElementType::kFp16:
      return FirstWord16(words, count, kLimitFp16);
    case ElementType::kFp32:
      return FirstWord32(words, count, kLimitFp32);
  }
  return 0;
}

}  // namespace
}  // namespace tessera::kernels
