// Packs rotated fp32 rows. Written over the including file's `Simd`. Internal linkage throughout:
// see ../README.md.
//
//   keys       per group of channels, as kernels/format/README.md defines them: 31-bit integers
//   threshold  by the upper 15 bits of the keys, four rows at a time; ties by all bits, then index
//   kept       the chosen channels, contiguous in fp32
//   stored     rounded or scaled
//
// The plain loops over whole vectors are vectorized by the compiler.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attend/expand-inl.h"
#include "kernels/format/part.h"

namespace tessera::kernels {
namespace {

constexpr int kMaxGroups = 256;
constexpr int kMaxBitWords = kMaxGroups / 32;
constexpr std::uint32_t kInfinityBits = 0x7f800000;

// Rows of one tile in fp32, in channel order; undefined from `padded` on.
struct FloatRows {
  alignas(64) float rows[kTileRows][kMaxHeadDim];
};

// The number of channels of one side's rows, rounded up to whole vectors. The padding is zero.
TESSERA_SIMD int PaddedOf(const RowShape& shape) {
  constexpr int kPadding = kChannelPadding;
  return (shape.channels + kPadding - 1) / kPadding * kPadding;
}

// The destination of a packed row.
struct PackTarget {
  std::byte* bits;
  std::byte* scale;
  std::byte* data;
};

struct ChosenGroups {
  std::uint32_t words[kMaxBitWords];  // one bit per group
};

// The bits of the largest magnitude.
TESSERA_SIMD std::uint32_t PeakBits(const float* row, int padded) {
  std::uint32_t peak = 0;
  for (int c = 0; c < padded; ++c) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, row + c, sizeof(bits));
    bits &= 0x7fffffffu;
    peak = bits > peak ? bits : peak;
  }
  return peak;
}

// The keys of a row's groups; those after the last group are 0.
template <int kGroup>
TESSERA_SIMD void FindKeys(const float* row, int padded, std::uint32_t peak, std::uint32_t* keys) {
  const int groups = padded / kGroup;
  if constexpr (kGroup == 1) {
    for (int g = 0; g < groups; ++g) {
      std::uint32_t bits;
      __builtin_memcpy(&bits, row + g, sizeof(bits));
      keys[g] = bits & 0x7fffffffu;
    }
  } else {
    std::uint32_t exponent = peak >> 23;
    exponent = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
    const float normaliser = __builtin_bit_cast(float, (254 - exponent) << 23);
    for (int g = 0; g < groups; ++g) {
      float sum = 0;
      for (int i = 0; i < kGroup; ++i) {
        const float scaled = row[g * kGroup + i] * normaliser;
        sum = __builtin_fmaf(scaled, scaled, sum);
      }
      __builtin_memcpy(keys + g, &sum, sizeof(sum));
    }
  }
  for (int g = groups; g % 32 != 0; ++g) keys[g] = 0;
}

// Adds the strongest `wanted` of the groups in `ties`, usually all; equal keys go to the lower
// group.
TESSERA_SIMD void ChooseAmongTies(const std::uint32_t* keys, int words, int wanted,
                                  ChosenGroups& ties, ChosenGroups& chosen) {
  int count = 0;
  for (int w = 0; w < words; ++w) count += __builtin_popcount(ties.words[w]);
  for (; count > wanted; --count) {  // drop the weakest; the last if tied
    int weakest = -1;
    for (int w = 0; w < words; ++w) {
      for (std::uint32_t bits = ties.words[w]; bits != 0; bits &= bits - 1) {
        const int g = 32 * w + __builtin_ctz(bits);
        if (weakest < 0 || keys[g] <= keys[weakest]) weakest = g;
      }
    }
    ties.words[weakest / 32] &= ~(1u << (weakest % 32));
  }
  for (int w = 0; w < words; ++w) chosen.words[w] |= ties.words[w];
}

constexpr int kRowsTogether = 4;

struct RowKeys {
  alignas(64) std::uint32_t keys[kRowsTogether][kMaxGroups];
  alignas(64) std::uint16_t upper[kRowsTogether][kMaxGroups];
};

// Selects the `wanted` groups with the largest keys of each row. Rows are independent chains of
// comparisons; four of them keep the execution units busy.
TESSERA_SIMD void ChooseGroups(RowKeys& rows, int groups, int wanted,
                               ChosenGroups (&chosen)[kRowsTogether]) {
  const int words = (groups + 31) / 32;
  for (int r = 0; r < kRowsTogether; ++r) {
    for (int g = 0; g < 32 * words; ++g) {
      rows.upper[r][g] = static_cast<std::uint16_t>(rows.keys[r][g] >> 16);
    }
  }
  // The largest threshold that enough groups reach.
  std::uint32_t threshold[kRowsTogether] = {};
  for (std::uint32_t bit = 1u << 14; bit != 0; bit >>= 1) {
    TESSERA_UNROLL for (int r = 0; r < kRowsTogether; ++r) {
      const std::uint32_t candidate = threshold[r] | bit;
      int count = 0;
      for (int w = 0; w < words; ++w) {
        count += __builtin_popcount(Simd::GreaterBits(rows.upper[r] + 32 * w, candidate - 1));
      }
      threshold[r] = count >= wanted ? candidate : threshold[r];
    }
  }
  for (int r = 0; r < kRowsTogether; ++r) {
    int above = 0;
    ChosenGroups ties;
    for (int w = 0; w < words; ++w) {
      const std::uint32_t greater = Simd::GreaterBits(rows.upper[r] + 32 * w, threshold[r]);
      const std::uint32_t equal = Simd::EqualBits(rows.upper[r] + 32 * w, threshold[r]);
      const int left = groups - 32 * w;  // clear bits after the last group
      chosen[r].words[w] = greater;
      ties.words[w] = equal & (left >= 32 ? ~0u : (1u << left) - 1);
      above += __builtin_popcount(greater);
    }
    ChooseAmongTies(rows.keys[r], words, wanted - above, ties, chosen[r]);
  }
}

// Writes the chosen channels contiguously, and up to one vector more.
template <int kGroup>
TESSERA_SIMD void CompressRow(const float* row, int padded, const ChosenGroups& chosen,
                              float* kept) {
  constexpr int kBits = Simd::kLanes / kGroup;
  for (int c = 0; c < padded; c += Simd::kLanes) {
    const int at = c / kGroup;
    const std::uint32_t bits = chosen.words[at / 32] >> (at % 32) & ((1u << kBits) - 1);
    Simd::StoreCompressed(kept, Simd::ChannelBits<kGroup>(bits), Simd::Load(row + c));
    kept += kGroup * __builtin_popcount(bits);
  }
}

// Converts kept values to bf16. `count` is rounded up to whole vectors; `kept` has room.
TESSERA_SIMD void ToBf16Values(const float* kept, int count, std::uint16_t* to) {
  for (int i = 0; i < count; ++i) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, kept + i, sizeof(bits));
    to[i] = static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
  }
}

TESSERA_SIMD float Bf16AsFloat(std::uint32_t bits) { return __builtin_bit_cast(float, bits << 16); }

TESSERA_SIMD std::uint32_t RoundToBf16Bits(float value) {
  const auto bits = __builtin_bit_cast(std::uint32_t, value);
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

TESSERA_SIMD void ToInt8Values(const float* kept, int count, float scale, std::int8_t* to) {
  constexpr float kToInteger = 0x1.8p23f;  // adding it rounds to the nearest integer, ties to even
  for (int i = 0; i < count; ++i) {
    const float quotient = scale == 0 ? 0.0f : kept[i] / scale;
    const float low = quotient < -127.0f ? -127.0f : quotient;
    const float clamped = low > 127.0f ? 127.0f : low;
    const float shifted = clamped + kToInteger;
    std::int32_t bits;
    __builtin_memcpy(&bits, &shifted, sizeof(bits));
    to[i] = static_cast<std::int8_t>(bits);  // the integer is in the lowest bits
  }
}

TESSERA_SIMD void ToFp8Values(const float* kept, int count, float scale, std::uint8_t* to) {
  for (int i = 0; i < count; ++i) {
    const float quotient = scale == 0 ? 0.0f : kept[i] / scale;
    std::uint32_t bits;
    __builtin_memcpy(&bits, &quotient, sizeof(bits));
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    float absolute;
    __builtin_memcpy(&absolute, &magnitude, sizeof(absolute));
    const float shifted = absolute + 16384.0f;  // below 2^-6 one unit is 2^-9
    std::uint32_t subnormal;
    __builtin_memcpy(&subnormal, &shifted, sizeof(subnormal));
    subnormal -= 0x46800000u;
    const std::uint32_t rounded =
        (magnitude + 0x7ffffu + (magnitude >> 20 & 1u) - 0x3c000000u) >> 20;
    std::uint32_t stored = magnitude < 0x3c800000u ? subnormal : rounded;
    stored = magnitude >= 0x43e00000u ? 0x7eu : stored;
    to[i] = static_cast<std::uint8_t>((bits >> 24 & 0x80u) | stored);
  }
}

// Stores kept values to the target, preceded by the scale if there is one.
template <ValueType kValues>
TESSERA_SIMD void StoreKept(int count, float* kept, const PackTarget& target) {
  const int whole = (count + 15) / 16 * 16;
  for (int i = count; i < whole; ++i) kept[i] = 0;
  alignas(64) std::uint16_t stored[kMaxHeadDim];
  if constexpr (kValues == ValueType::kBf16) {
    ToBf16Values(kept, whole, stored);
  } else if constexpr (kValues == ValueType::kFp16) {
    Simd::ToFp16(kept, whole, stored);
  } else {
    constexpr bool kInt8 = kValues == ValueType::kInt8;
    constexpr float kLargestStored = kInt8 ? 127.0f : 448.0f;
    const float peak = __builtin_bit_cast(float, PeakBits(kept, whole));
    const std::uint32_t scale =
        peak < kSmallestScaledPeak ? 0 : RoundToBf16Bits(peak / kLargestStored);
    const auto scale_bits = static_cast<std::uint16_t>(scale);
    __builtin_memcpy(target.scale, &scale_bits, sizeof(scale_bits));
    if constexpr (kInt8) {
      ToInt8Values(kept, whole, Bf16AsFloat(scale), reinterpret_cast<std::int8_t*>(stored));
    } else {
      ToFp8Values(kept, whole, Bf16AsFloat(scale), reinterpret_cast<std::uint8_t*>(stored));
    }
  }
  __builtin_memcpy(target.data, stored, static_cast<std::size_t>(count) * kValueBytes<kValues>);
}

// Same as UnstorableBits in format/value_type.h.
template <ValueType kValues>
constexpr std::uint32_t kUnstorableBits = kValues == ValueType::kBf16   ? 0x7f7f8000
                                          : kValues == ValueType::kFp16 ? 0x477ff000
                                                                        : kInfinityBits;
static_assert(kUnstorableBits<ValueType::kBf16> == UnstorableBits(ValueType::kBf16));
static_assert(kUnstorableBits<ValueType::kFp16> == UnstorableBits(ValueType::kFp16));
static_assert(kUnstorableBits<ValueType::kInt8> == UnstorableBits(ValueType::kInt8));

// Packs rows that keep every channel.
template <ValueType kValues, class Target>
TESSERA_SIMD bool PackWholeRows(const RowShape& shape, const FloatRows& rows, int count,
                                Target target) {
  const int padded = PaddedOf(shape);
  for (int r = 0; r < count; ++r) {
    if (PeakBits(rows.rows[r], padded) >= kUnstorableBits<kValues>) return false;
    alignas(64) float kept[kMaxHeadDim + 16];
    __builtin_memcpy(kept, rows.rows[r], static_cast<std::size_t>(padded) * sizeof(float));
    StoreKept<kValues>(shape.kept, kept, target(r));
  }
  return true;
}

// Packs rows [0, count); `target(r)` is the destination of row r. False if a value cannot be
// stored.
template <ValueType kValues, int kGroup, class Target>
TESSERA_SIMD bool PackRows(const RowShape& shape, const RowBytes& bytes, const FloatRows& rows,
                           int count, Target target) {
  const int padded = PaddedOf(shape);
  const int groups = shape.channels / kGroup;
  if (bytes.bits == 0) return PackWholeRows<kValues>(shape, rows, count, target);
  RowKeys keys;
  for (int first = 0; first < count; first += kRowsTogether) {
    for (int i = 0; i < kRowsTogether; ++i) {
      const int r = first + i < count ? first + i : first;  // repeat the first row
      const std::uint32_t peak = PeakBits(rows.rows[r], padded);
      if (peak >= kUnstorableBits<kValues>) return false;
      FindKeys<kGroup>(rows.rows[r], padded, peak, keys.keys[i]);
    }
    ChosenGroups chosen[kRowsTogether];
    ChooseGroups(keys, groups, shape.kept / kGroup, chosen);
    for (int i = 0; i < kRowsTogether && first + i < count; ++i) {
      const PackTarget to = target(first + i);
      alignas(64) float kept[kMaxHeadDim + 16];
      CompressRow<kGroup>(rows.rows[first + i], padded, chosen[i], kept);
      __builtin_memcpy(to.bits, chosen[i].words, bytes.bits);
      StoreKept<kValues>(shape.kept, kept, to);
    }
  }
  return true;
}

}  // namespace
}  // namespace tessera::kernels
