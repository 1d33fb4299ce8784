// Byte products on AVX-512 BW, and on VNNI where it exists: the vocabulary `ByteSimd`.
//
// Compiled with AVX-512 flags, so everything has internal linkage: see ../README.md.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/simd/always_inline-inl.h"

namespace tessera::kernels {
namespace {

struct ByteSimd {
  using Bytes = __m512i;
  using Ints = __m512i;
  static constexpr int kBytes = 64;
  static constexpr int kWords = 16;       // 32-bit words of a vector
  static constexpr int kGroups = 4;       // groups of four words
  static constexpr int kQuadsAtOnce = 4;  // quads whose sums over groups fill a vector

  TESSERA_SIMD Bytes Zero() { return _mm512_setzero_si512(); }
  TESSERA_SIMD Bytes Load(const void* from) { return _mm512_loadu_si512(from); }
  // Half a vector; the rest is zero.
  TESSERA_SIMD Bytes LoadHalf(const void* from) {
    return _mm512_zextsi256_si512(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
  }
  TESSERA_SIMD void Store(void* to, Ints value) { _mm512_storeu_si512(to, value); }
  TESSERA_SIMD Bytes SplatWord(const void* word) {
    std::int32_t bits;
    __builtin_memcpy(&bits, word, sizeof(bits));
    return _mm512_set1_epi32(bits);
  }

  // Bits [kShift, kShift + 4) or, for crumbs, [kShift, kShift + 2) of each byte.
  template <int kShift>
  TESSERA_SIMD Bytes Nibble(Bytes bytes) {
    if constexpr (kShift != 0) bytes = _mm512_srli_epi16(bytes, kShift);
    return _mm512_and_si512(bytes, _mm512_set1_epi8(15));
  }
  template <int kShift>
  TESSERA_SIMD Bytes Crumb(Bytes bytes) {
    if constexpr (kShift != 0) bytes = _mm512_srli_epi16(bytes, kShift);
    return _mm512_and_si512(bytes, _mm512_set1_epi8(3));
  }

  // Products of unsigned and signed bytes, summed by four. `Sums` may hold at most kMostProducts
  // vectors of products of a nibble and an int8, or of a nibble and a weight of 8 bits, between
  // Finish and Begin.
#if defined(__AVX512VNNI__)
  static constexpr int kMostKeyProducts = 1 << 16;
  static constexpr int kMostValueProducts = 1 << 16;
  using Sums = __m512i;
  TESSERA_SIMD Sums Begin(Ints total) { return total; }
  TESSERA_SIMD Sums AddProducts(Sums sums, Bytes is_unsigned, Bytes is_signed) {
    return _mm512_dpbusd_epi32(sums, is_unsigned, is_signed);
  }
  TESSERA_SIMD Ints Finish(Ints, Sums sums) { return sums; }
#else
  static constexpr int kMostKeyProducts = 8;    // 8 x 2 x 15 x 127 < 2^15
  static constexpr int kMostValueProducts = 4;  // 4 x 2 x 15 x 255 < 2^15
  using Sums = __m512i;                         // of pairs, 16 bits
  TESSERA_SIMD Sums Begin(Ints) { return _mm512_setzero_si512(); }
  TESSERA_SIMD Sums AddProducts(Sums sums, Bytes is_unsigned, Bytes is_signed) {
    return _mm512_add_epi16(sums, _mm512_maddubs_epi16(is_unsigned, is_signed));
  }
  TESSERA_SIMD Ints Finish(Ints total, Sums sums) {
    return _mm512_add_epi32(total, _mm512_madd_epi16(sums, _mm512_set1_epi16(1)));
  }
#endif

  template <int kBits>
  TESSERA_SIMD Ints ShiftLeft(Ints value) {
    return _mm512_slli_epi32(value, kBits);
  }
  TESSERA_SIMD Ints Add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
  // Sums the groups of each input: words 4 i .. 4 i + 3 are the sum of `a[i]`.
  TESSERA_SIMD Ints SumGroups(const Ints (&a)[kQuadsAtOnce]) {
    const Ints u =
        Add(_mm512_shuffle_i64x2(a[0], a[1], 0x44), _mm512_shuffle_i64x2(a[0], a[1], 0xee));
    const Ints v =
        Add(_mm512_shuffle_i64x2(a[2], a[3], 0x44), _mm512_shuffle_i64x2(a[2], a[3], 0xee));
    return Add(_mm512_shuffle_i64x2(u, v, 0x88), _mm512_shuffle_i64x2(u, v, 0xdd));
  }
  TESSERA_SIMD __m512 ToFloats(Ints value) { return _mm512_cvtepi32_ps(value); }
  // Rounds lanes in [0, 255] to the nearest integer, ties to even, one byte each.
  TESSERA_SIMD void StoreRounded(std::uint8_t* to, __m512 value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(value)));
  }
  TESSERA_SIMD __m512 Round(__m512 value) {
    return _mm512_roundscale_ps(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  TESSERA_SIMD __m512 Floor(__m512 value) {
    return _mm512_roundscale_ps(value, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  }
  // One bit per lane: whether it is at least 0.
  TESSERA_SIMD std::uint32_t NotNegativeBits(__m512 value) {
    return _mm512_cmp_ps_mask(value, _mm512_setzero_ps(), _CMP_GE_OQ);
  }
  // Widens bf16 words to floats.
  TESSERA_SIMD __m512 LoadBf16(const void* words) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(words))), 16));
  }
};

}  // namespace
}  // namespace tessera::kernels
