// The stored value types of packed rows and their scalar conversions. int8 and fp8 rows have a bf16
// scale: element = scale * stored value.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "kernels/format/element.h"

namespace tessera::kernels {

// The numbers are part of the tile formats: never reuse one.
enum class ValueType : std::uint8_t { kBf16 = 1, kFp16 = 2, kInt8 = 3, kFp8 = 4 };

constexpr bool IsValueType(std::uint8_t value) { return value >= 1 && value <= 4; }
constexpr bool IsScaled(ValueType type) {
  return type == ValueType::kInt8 || type == ValueType::kFp8;
}
constexpr std::size_t ValueBytes(ValueType type) { return IsScaled(type) ? 1 : 2; }
constexpr std::size_t ScaleBytes(ValueType type) { return IsScaled(type) ? 2 : 0; }

constexpr const char* ValueTypeName(ValueType type) {
  switch (type) {
    case ValueType::kBf16:
      return "bf16";
    case ValueType::kFp16:
      return "fp16";
    case ValueType::kInt8:
      return "int8";
    case ValueType::kFp8:
      return "fp8";
  }
  return "unknown";
}

// The bits of the smallest magnitude that cannot be stored because it would round to infinity.
constexpr std::uint32_t UnstorableBits(ValueType type) {
  switch (type) {
    case ValueType::kBf16:
      return 0x7f7f8000;
    case ValueType::kFp16:
      return 0x477ff000;  // 65520
    case ValueType::kInt8:
    case ValueType::kFp8:
      return 0x7f800000;
  }
  return 0;
}

// The stored value of a row's largest element.
constexpr float LargestStored(ValueType type) { return type == ValueType::kInt8 ? 127.0f : 448.0f; }

// A row whose largest magnitude is below this is stored as zeros with scale 0, because its scale
// would be subnormal. About 2^-100. It is both 127 and 448 times a bf16, so a row just above the
// limit stays above it after a round trip.
inline constexpr float kSmallestScaledPeak = 127 * 7 * 0x1p-110f;

// The scale of a row whose largest magnitude is `peak`. Rounding to nearest makes the peak's stored
// value exactly LargestStored, so re-encoding a decoded row gives the same bytes.
constexpr std::uint16_t ScaleOf(ValueType type, float peak) {
  return peak < kSmallestScaledPeak ? 0 : FloatToBf16(peak / LargestStored(type));
}

// fp8 is e4m3: 1 sign, 4 exponent (bias 7) and 3 mantissa bits, no infinity. NaN has all bits but
// the sign set.
constexpr float Fp8ToFloat(std::uint8_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x80u) << 24;
  const std::uint32_t magnitude = bits & 0x7fu;
  if (magnitude == 0x7f) return std::bit_cast<float>(sign | 0x7fc00000u);
  // Read as fp16 (exponent bias 15) the same bits mean value / 2^8; this covers subnormals too.
  const float value = Fp16ToFloat(static_cast<std::uint16_t>(magnitude << 7)) * 256.0f;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(value));
}

// Rounds to nearest, ties to even; saturates at 448. NaN stays NaN.
constexpr std::uint8_t FloatToFp8(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint8_t sign = static_cast<std::uint8_t>((bits >> 24) & 0x80u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint8_t>(sign | 0x7fu);
  if (magnitude >= 0x43e00000u) return static_cast<std::uint8_t>(sign | 0x7eu);  // 448 and above
  if (magnitude < 0x3c800000u) {  // below 2^-6: subnormal; the float addition rounds
    const float shifted = std::bit_cast<float>(magnitude) + 16384.0f;  // one unit is 2^-9
    return static_cast<std::uint8_t>(
        sign | (std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(16384.0f)));
  }
  const std::uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  return static_cast<std::uint8_t>(sign | ((rounded - 0x3c000000u) >> 20));
}

// Quantizes `value`, an element of a row with this scale.
constexpr std::uint8_t ToScaled(ValueType type, float value, float scale) {
  if (scale == 0) return 0;
  const float quotient = value / scale;
  if (type == ValueType::kFp8) return FloatToFp8(quotient);
  constexpr float kToInteger = 0x1.8p23f;  // adding it rounds to the nearest integer, ties to even
  const float clamped = quotient > 127.0f ? 127.0f : quotient < -127.0f ? -127.0f : quotient;
  const float rounded = (clamped + kToInteger) - kToInteger;
  return static_cast<std::uint8_t>(static_cast<std::int8_t>(rounded));
}

// The stored value as a float; the element is this times the row's scale.
constexpr float FromScaled(ValueType type, std::uint8_t stored) {
  if (type == ValueType::kFp8) return Fp8ToFloat(stored);
  return static_cast<float>(static_cast<std::int8_t>(stored));
}

}  // namespace tessera::kernels
