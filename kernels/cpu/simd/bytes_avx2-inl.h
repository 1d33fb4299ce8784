// Byte products on AVX2: the vocabulary `ByteSimd`. bytes_avx512-inl.h documents each function.
//
// Compiled with AVX2 flags, so everything has internal linkage: see ../README.md.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/simd/always_inline-inl.h"

namespace tessera::kernels {
namespace {

struct ByteSimd {
  using Bytes = __m256i;
  using Ints = __m256i;
  static constexpr int kBytes = 32;
  static constexpr int kWords = 8;
  static constexpr int kGroups = 2;
  static constexpr int kQuadsAtOnce = 2;

  TESSERA_SIMD Bytes Zero() { return _mm256_setzero_si256(); }
  TESSERA_SIMD Bytes Load(const void* from) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(from));
  }
  TESSERA_SIMD Bytes LoadHalf(const void* from) {
    return _mm256_zextsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(from)));
  }
  TESSERA_SIMD void Store(void* to, Ints value) {
    _mm256_storeu_si256(static_cast<__m256i*>(to), value);
  }
  TESSERA_SIMD Bytes SplatWord(const void* word) {
    std::int32_t bits;
    __builtin_memcpy(&bits, word, sizeof(bits));
    return _mm256_set1_epi32(bits);
  }

  template <int kShift>
  TESSERA_SIMD Bytes Nibble(Bytes bytes) {
    if constexpr (kShift != 0) bytes = _mm256_srli_epi16(bytes, kShift);
    return _mm256_and_si256(bytes, _mm256_set1_epi8(15));
  }
  template <int kShift>
  TESSERA_SIMD Bytes Crumb(Bytes bytes) {
    if constexpr (kShift != 0) bytes = _mm256_srli_epi16(bytes, kShift);
    return _mm256_and_si256(bytes, _mm256_set1_epi8(3));
  }

  static constexpr int kMostKeyProducts = 8;
  static constexpr int kMostValueProducts = 4;
  using Sums = __m256i;
  TESSERA_SIMD Sums Begin(Ints) { return _mm256_setzero_si256(); }
  TESSERA_SIMD Sums AddProducts(Sums sums, Bytes is_unsigned, Bytes is_signed) {
    return _mm256_add_epi16(sums, _mm256_maddubs_epi16(is_unsigned, is_signed));
  }
  TESSERA_SIMD Ints Finish(Ints total, Sums sums) {
    return _mm256_add_epi32(total, _mm256_madd_epi16(sums, _mm256_set1_epi16(1)));
  }

  template <int kBits>
  TESSERA_SIMD Ints ShiftLeft(Ints value) {
    return _mm256_slli_epi32(value, kBits);
  }
  TESSERA_SIMD Ints Add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
  TESSERA_SIMD Ints SumGroups(const Ints (&a)[kQuadsAtOnce]) {
    return Add(_mm256_permute2x128_si256(a[0], a[1], 0x20),
               _mm256_permute2x128_si256(a[0], a[1], 0x31));
  }
  TESSERA_SIMD __m256 ToFloats(Ints value) { return _mm256_cvtepi32_ps(value); }
  TESSERA_SIMD void StoreRounded(std::uint8_t* to, __m256 value) {
    const __m256i ints = _mm256_cvtps_epi32(value);
    const __m128i words =
        _mm_packs_epi32(_mm256_castsi256_si128(ints), _mm256_extracti128_si256(ints, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(words, words));
  }
  TESSERA_SIMD __m256 Round(__m256 value) {
    return _mm256_round_ps(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  TESSERA_SIMD __m256 Floor(__m256 value) { return _mm256_floor_ps(value); }
  TESSERA_SIMD std::uint32_t NotNegativeBits(__m256 value) {
    return static_cast<std::uint32_t>(
        _mm256_movemask_ps(_mm256_cmp_ps(value, _mm256_setzero_ps(), _CMP_GE_OQ)));
  }
  TESSERA_SIMD __m256 LoadBf16(const void* words) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(
        _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(words))), 16));
  }
};

}  // namespace
}  // namespace tessera::kernels
