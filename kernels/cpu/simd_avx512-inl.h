// The vector vocabulary of attend_part-inl.h and first_unusable-inl.h on AVX-512 (F, BW, DQ, VL).
//
// Compiled with AVX-512 flags, so everything has internal linkage: see README.md.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/inline-inl.h"
#include "kernels/format/element.h"

namespace tessera::kernels {
namespace {

struct Simd {
  using Floats = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kRowGroup = 4;  // query rows that share one pass over a tile's registers

  // 2 * kLanes consecutive channels of a row as floats, in the order that is cheapest to produce:
  // bf16 gives (even, odd) channels, the others (first half, second half). Queries and outputs
  // are kept in the same order, so a dot product never notices.
  struct Pair {
    Floats a;
    Floats b;
  };

  TESSERA_SIMD Floats Zero() { return _mm512_setzero_ps(); }
  TESSERA_SIMD Floats Splat(float value) { return _mm512_set1_ps(value); }
  TESSERA_SIMD Floats Load(const float* from) { return _mm512_loadu_ps(from); }
  TESSERA_SIMD void Store(float* to, Floats value) { _mm512_storeu_ps(to, value); }
  TESSERA_SIMD Floats Add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  TESSERA_SIMD Floats Subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
  TESSERA_SIMD Floats Multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  TESSERA_SIMD Floats Divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
  TESSERA_SIMD Floats MultiplyAdd(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  // Where either is NaN these return the second operand.
  TESSERA_SIMD Floats Max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
  TESSERA_SIMD Floats Min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
  TESSERA_SIMD float MaxLane(Floats value) { return _mm512_reduce_max_ps(value); }

  TESSERA_SIMD Floats Absolute(Floats value) { return _mm512_abs_ps(value); }
  TESSERA_SIMD Floats WithSignOf(Floats magnitude, Floats sign) {
    return _mm512_or_ps(magnitude, _mm512_and_ps(sign, _mm512_set1_ps(-0.0f)));
  }

  template <ElementType kType>
  TESSERA_SIMD Pair LoadPair(const std::byte* from) {
    if constexpr (kType == ElementType::kBf16) {
      const __m512i bits = _mm512_loadu_si512(from);
      return {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)),
              _mm512_castsi512_ps(
                  _mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
    } else if constexpr (kType == ElementType::kFp16) {
      const auto* halves = reinterpret_cast<const __m256i*>(from);
      return {_mm512_cvtph_ps(_mm256_loadu_si256(halves)),
              _mm512_cvtph_ps(_mm256_loadu_si256(halves + 1))};
    } else {
      return {_mm512_loadu_ps(from), _mm512_loadu_ps(from + sizeof(Floats))};
    }
  }

  // Back to channel order.
  template <ElementType kType>
  TESSERA_SIMD Pair InOrder(Pair pair) {
    if constexpr (kType != ElementType::kBf16) return pair;
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high =
        _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    return {_mm512_permutex2var_ps(pair.a, low, pair.b),
            _mm512_permutex2var_ps(pair.a, high, pair.b)};
  }

  // In each 128-bit block: [sum of block of a0, of a1, of a2, of a3].
  TESSERA_SIMD Floats SumBlocks(Floats a0, Floats a1, Floats a2, Floats a3) {
    const Floats t0 = Add(_mm512_unpacklo_ps(a0, a1), _mm512_unpackhi_ps(a0, a1));
    const Floats t1 = Add(_mm512_unpacklo_ps(a2, a3), _mm512_unpackhi_ps(a2, a3));
    const __m512d u0 = _mm512_castps_pd(t0);
    const __m512d u1 = _mm512_castps_pd(t1);
    return Add(_mm512_castpd_ps(_mm512_unpacklo_pd(u0, u1)),
               _mm512_castpd_ps(_mm512_unpackhi_pd(u0, u1)));
  }

  // Sums the blocks of each input: lane 4 i + j is the whole sum of row j of `blocks[i]`.
  TESSERA_SIMD Floats SumAcross(const Floats (&blocks)[kLanes / 4]) {
    const Floats t0 = Add(_mm512_shuffle_f32x4(blocks[0], blocks[1], 0x88),
                          _mm512_shuffle_f32x4(blocks[0], blocks[1], 0xdd));
    const Floats t1 = Add(_mm512_shuffle_f32x4(blocks[2], blocks[3], 0x88),
                          _mm512_shuffle_f32x4(blocks[2], blocks[3], 0xdd));
    return Add(_mm512_shuffle_f32x4(t0, t1, 0x88), _mm512_shuffle_f32x4(t0, t1, 0xdd));
  }

  // value where begin <= first + lane < end, -infinity elsewhere.
  TESSERA_SIMD Floats Visible(Floats value, int first, int begin, int end) {
    const __m512i lane =
        _mm512_add_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                         _mm512_set1_epi32(first));
    const __mmask16 inside = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(begin)) &
                             _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(end));
    return _mm512_mask_blend_ps(inside, _mm512_set1_ps(-__builtin_inff()), value);
  }

  // 2^x for x <= 0, exactly 1 at 0 and exactly 0 below 2^-150; relative error under 2^-23.
  TESSERA_SIMD Floats Exp2(Floats x) {
    x = Max(Splat(-160.0f), x);
    const Floats whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm512_scalef_ps(Exp2Fraction<Simd>(Subtract(x, whole)), whole);
  }

  // The index of the first 16-bit (32-bit) word among those of one vector whose low 15 (31) bits
  // are at least `limit`, or -1.
  static constexpr int kVectorBytes = 64;
  TESSERA_SIMD int FirstAtLeast16(const std::byte* from, std::uint16_t limit) {
    const __m512i magnitude = _mm512_and_si512(_mm512_loadu_si512(from), _mm512_set1_epi16(0x7fff));
    const std::uint32_t large = _mm512_cmpge_epu16_mask(
        magnitude, _mm512_set1_epi16(static_cast<short>(limit)));  // NOLINT: the intrinsic's type
    return large == 0 ? -1 : __builtin_ctz(large);
  }
  TESSERA_SIMD int FirstAtLeast32(const std::byte* from, std::uint32_t limit) {
    const __m512i magnitude =
        _mm512_and_si512(_mm512_loadu_si512(from), _mm512_set1_epi32(0x7fffffff));
    const std::uint32_t large =
        _mm512_cmpge_epu32_mask(magnitude, _mm512_set1_epi32(static_cast<int>(limit)));
    return large == 0 ? -1 : __builtin_ctz(large);
  }
};

}  // namespace
}  // namespace tessera::kernels
