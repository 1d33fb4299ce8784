// The vector vocabulary of attend_part-inl.h and first_unusable-inl.h on AVX2, FMA and F16C. The
// meaning of each function is written in simd_avx512-inl.h.
//
// Compiled with AVX2 flags, so everything has internal linkage: see README.md.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/inline-inl.h"
#include "kernels/format/element.h"

namespace tessera::kernels {
namespace {

struct Simd {
  using Floats = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kRowGroup = 2;  // 16 registers hold no more

  struct Pair {
    Floats a;
    Floats b;
  };

  TESSERA_SIMD Floats Zero() { return _mm256_setzero_ps(); }
  TESSERA_SIMD Floats Splat(float value) { return _mm256_set1_ps(value); }
  TESSERA_SIMD Floats Load(const float* from) { return _mm256_loadu_ps(from); }
  TESSERA_SIMD void Store(float* to, Floats value) { _mm256_storeu_ps(to, value); }
  TESSERA_SIMD Floats Add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
  TESSERA_SIMD Floats Subtract(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
  TESSERA_SIMD Floats Multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  TESSERA_SIMD Floats Divide(Floats a, Floats b) { return _mm256_div_ps(a, b); }
  TESSERA_SIMD Floats MultiplyAdd(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
  TESSERA_SIMD Floats Max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
  TESSERA_SIMD Floats Min(Floats a, Floats b) { return _mm256_min_ps(a, b); }
  TESSERA_SIMD float MaxLane(Floats value) {
    __m128 max = _mm_max_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
    max = _mm_max_ps(max, _mm_movehl_ps(max, max));
    max = _mm_max_ss(max, _mm_movehdup_ps(max));
    return _mm_cvtss_f32(max);
  }

  TESSERA_SIMD Floats Absolute(Floats value) {
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), value);
  }
  TESSERA_SIMD Floats WithSignOf(Floats magnitude, Floats sign) {
    return _mm256_or_ps(magnitude, _mm256_and_ps(sign, _mm256_set1_ps(-0.0f)));
  }

  template <ElementType kType>
  TESSERA_SIMD Pair LoadPair(const std::byte* from) {
    if constexpr (kType == ElementType::kBf16) {
      const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
      return {_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16)),
              _mm256_castsi256_ps(
                  _mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
    } else if constexpr (kType == ElementType::kFp16) {
      const auto* halves = reinterpret_cast<const __m128i*>(from);
      return {_mm256_cvtph_ps(_mm_loadu_si128(halves)),
              _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
    } else {
      const auto* floats = reinterpret_cast<const float*>(from);
      return {_mm256_loadu_ps(floats), _mm256_loadu_ps(floats + kLanes)};
    }
  }

  template <ElementType kType>
  TESSERA_SIMD Pair InOrder(Pair pair) {
    if constexpr (kType != ElementType::kBf16) return pair;
    const Floats low = _mm256_unpacklo_ps(pair.a, pair.b);   // channels 0-3 and 8-11
    const Floats high = _mm256_unpackhi_ps(pair.a, pair.b);  // channels 4-7 and 12-15
    return {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
  }

  TESSERA_SIMD Floats SumBlocks(Floats a0, Floats a1, Floats a2, Floats a3) {
    return _mm256_hadd_ps(_mm256_hadd_ps(a0, a1), _mm256_hadd_ps(a2, a3));
  }

  TESSERA_SIMD Floats SumAcross(const Floats (&blocks)[kLanes / 4]) {
    return Add(_mm256_permute2f128_ps(blocks[0], blocks[1], 0x20),
               _mm256_permute2f128_ps(blocks[0], blocks[1], 0x31));
  }

  TESSERA_SIMD Floats Visible(Floats value, int first, int begin, int end) {
    const __m256i lane =
        _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(first));
    const __m256i inside = _mm256_and_si256(_mm256_cmpgt_epi32(lane, _mm256_set1_epi32(begin - 1)),
                                            _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane));
    return _mm256_blendv_ps(_mm256_set1_ps(-__builtin_inff()), value, _mm256_castsi256_ps(inside));
  }

  // As on AVX-512, but what would be subnormal is 0.
  TESSERA_SIMD Floats Exp2(Floats x) {
    const Floats tiny = _mm256_cmp_ps(x, Splat(-126.0f), _CMP_LT_OQ);
    x = Max(Splat(-126.0f), x);
    const Floats whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256i exponent =
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
    const Floats power =
        Multiply(Exp2Fraction<Simd>(Subtract(x, whole)), _mm256_castsi256_ps(exponent));
    return _mm256_andnot_ps(tiny, power);
  }

  static constexpr int kVectorBytes = 32;
  TESSERA_SIMD int FirstAtLeast16(const std::byte* from, std::uint16_t limit) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i large =
        _mm256_cmpgt_epi16(_mm256_and_si256(bits, _mm256_set1_epi16(0x7fff)),
                           _mm256_set1_epi16(static_cast<short>(limit - 1)));  // NOLINT: see above
    const auto mask = static_cast<std::uint32_t>(_mm256_movemask_epi8(large));
    return mask == 0 ? -1 : __builtin_ctz(mask) / 2;
  }
  TESSERA_SIMD int FirstAtLeast32(const std::byte* from, std::uint32_t limit) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i large = _mm256_cmpgt_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)),
                                             _mm256_set1_epi32(static_cast<int>(limit - 1)));
    const auto mask = static_cast<std::uint32_t>(_mm256_movemask_epi8(large));
    return mask == 0 ? -1 : __builtin_ctz(mask) / 4;
  }
};

}  // namespace
}  // namespace tessera::kernels
