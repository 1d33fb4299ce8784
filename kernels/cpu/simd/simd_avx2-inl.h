// The vector vocabulary `Simd` on AVX2, FMA and F16C. simd_avx512-inl.h documents each function.
//
// Compiled with AVX2 flags, so everything has internal linkage: see ../README.md.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/simd/always_inline-inl.h"
#include "kernels/format/element.h"
#include "kernels/format/value_type.h"

namespace tessera::kernels {
namespace {

// Byte shuffles that move words to the channels whose bit is set, and zeros to the others.
struct Shuffles {
  std::uint8_t bytes[256][16];
};
constexpr Shuffles MakeShuffles() {
  Shuffles shuffles = {};
  for (int bits = 0; bits < 256; ++bits) {
    int word = 0;
    for (int channel = 0; channel < 8; ++channel) {
      const bool set = (bits >> channel & 1) != 0;
      shuffles.bytes[bits][2 * channel] = static_cast<std::uint8_t>(set ? 2 * word : 0x80);
      shuffles.bytes[bits][2 * channel + 1] = static_cast<std::uint8_t>(set ? 2 * word + 1 : 0x80);
      if (set) ++word;
    }
  }
  return shuffles;
}
alignas(64) constexpr Shuffles kShuffles = MakeShuffles();

struct Simd {
  static constexpr char kName[] = "avx2";
  using Floats = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kRowGroup = 2;  // limited by 16 registers

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

  TESSERA_SIMD Floats WhereBits(std::uint32_t bits, Floats a, Floats b) {
    const __m256i own = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i all = _mm256_set1_epi32(static_cast<int>(bits));
    const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(all, own), own);
    return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(set));
  }

  struct Exponent {
    Floats mantissa;
    Floats exponent;
  };
  TESSERA_SIMD Exponent SplitExponent(Floats value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i exponent =
        _mm256_srai_epi32(_mm256_sub_epi32(bits, _mm256_set1_epi32(0x3f3504f3)), 23);
    return {_mm256_castsi256_ps(_mm256_sub_epi32(bits, _mm256_slli_epi32(exponent, 23))),
            _mm256_cvtepi32_ps(exponent)};
  }
  TESSERA_SIMD Floats LogOrLimit(Floats value, Floats log) {
    const Floats positive = _mm256_cmp_ps(value, Zero(), _CMP_GT_OQ);
    const Floats zero = _mm256_cmp_ps(value, Zero(), _CMP_EQ_OQ);
    const Floats limit =
        _mm256_blendv_ps(Splat(__builtin_nanf("")), Splat(-__builtin_inff()), zero);
    return _mm256_blendv_ps(limit, log, positive);
  }

  // As on AVX-512.
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

  // ---- packed rows: see expand-inl.h ----

  static constexpr int kStepChannels = 8;
  using Words = __m128i;

  TESSERA_SIMD Words ZeroWords() { return _mm_setzero_si128(); }
  TESSERA_SIMD void StoreWords(std::byte* to, Words words) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), words);
  }

  TESSERA_SIMD void CopyStep(const std::byte* from, std::byte* to) {
    const auto* vectors = reinterpret_cast<const __m256i*>(from);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_loadu_si256(vectors));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to) + 1, _mm256_loadu_si256(vectors + 1));
  }

  // Expands one bit per group to one bit per channel, for 8 channels.
  template <int kGroup>
  TESSERA_SIMD std::uint32_t ChannelBits(std::uint32_t bits) {
    if constexpr (kGroup == 1) return bits;
    if constexpr (kGroup == 2) {
      const std::uint32_t apart =
          (bits & 1u) | (bits & 2u) << 1 | (bits & 4u) << 2 | (bits & 8u) << 3;
      return apart * 3u;
    }
    return ((bits & 1u) | (bits & 2u) << 3) * 15u;
  }

  TESSERA_SIMD Words ToBf16Words(Floats low_and_high) {
    const __m256i high_words = _mm256_srli_epi32(_mm256_castps_si256(low_and_high), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high_words),
                            _mm256_extracti128_si256(high_words, 1));
  }
  TESSERA_SIMD Words WordsOf(ValueType values, __m128i bytes) {
    if (values == ValueType::kInt8) {
      return ToBf16Words(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)));
    }
    const __m128i wide = _mm_cvtepu8_epi16(bytes);
    const __m128i half = _mm_or_si128(_mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x80)), 8),
                                      _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x7f)), 7));
    return ToBf16Words(Multiply(_mm256_cvtph_ps(half), Splat(256.0f)));
  }

  template <ValueType kValues, int kGroup>
  TESSERA_SIMD Words ExpandStep(std::uint32_t bits, const std::byte* from) {
    constexpr bool kWide = kValues == ValueType::kBf16 || kValues == ValueType::kFp16;
    const __m128i packed =
        kWide ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(from))
              : WordsOf(kValues, _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    const auto* shuffle =
        reinterpret_cast<const __m128i*>(kShuffles.bytes[ChannelBits<kGroup>(bits)]);
    return _mm_shuffle_epi8(packed, _mm_load_si128(shuffle));
  }

  // ---- packing rows: see pack_row-inl.h ----

  // Packs 32 masks of 16 bits each into 32 bits.
  TESSERA_SIMD std::uint32_t BitsOfWords(__m256i low, __m256i high) {
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xd8);
    return static_cast<std::uint32_t>(_mm256_movemask_epi8(bytes));
  }
  TESSERA_SIMD std::uint32_t GreaterBits(const std::uint16_t* words, std::uint32_t limit) {
    const __m256i bound = _mm256_set1_epi16(static_cast<short>(limit));  // NOLINT
    const auto* vectors = reinterpret_cast<const __m256i*>(words);
    return BitsOfWords(_mm256_cmpgt_epi16(_mm256_loadu_si256(vectors), bound),
                       _mm256_cmpgt_epi16(_mm256_loadu_si256(vectors + 1), bound));
  }
  TESSERA_SIMD std::uint32_t EqualBits(const std::uint16_t* words, std::uint32_t value) {
    const __m256i wanted = _mm256_set1_epi16(static_cast<short>(value));  // NOLINT
    const auto* vectors = reinterpret_cast<const __m256i*>(words);
    return BitsOfWords(_mm256_cmpeq_epi16(_mm256_loadu_si256(vectors), wanted),
                       _mm256_cmpeq_epi16(_mm256_loadu_si256(vectors + 1), wanted));
  }
  TESSERA_SIMD void StoreCompressed(float* to, std::uint32_t bits, Floats value) {
    alignas(32) float lanes[kLanes];
    Store(lanes, value);
    for (; bits != 0; bits &= bits - 1) *to++ = lanes[__builtin_ctz(bits)];
  }
  TESSERA_SIMD void ToFp16(const float* from, int count, std::uint16_t* to) {
    for (int i = 0; i < count; i += kLanes) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                       _mm256_cvtps_ph(Load(from + i), _MM_FROUND_TO_NEAREST_INT));
    }
  }

  // ---- choosing blocks: see select-inl.h ----

  using Integers = __m256i;

  TESSERA_SIMD Integers SplatInteger(std::uint32_t value) {
    return _mm256_set1_epi32(static_cast<int>(value));
  }
  TESSERA_SIMD Integers LoadIntegers(const std::uint32_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }
  TESSERA_SIMD void StoreIntegers(std::uint32_t* to, Integers value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value);
  }
  TESSERA_SIMD Integers LoadHalfWords(const void* from) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)));
  }
  TESSERA_SIMD Integers AddIntegers(Integers a, Integers b) { return _mm256_add_epi32(a, b); }
  TESSERA_SIMD Integers And(Integers a, Integers b) { return _mm256_and_si256(a, b); }
  TESSERA_SIMD std::uint32_t BitsOf(Integers mask) {
    return static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(mask)));
  }
  TESSERA_SIMD std::uint32_t ZeroBits(Integers a) {
    return BitsOf(_mm256_cmpeq_epi32(a, _mm256_setzero_si256()));
  }
  TESSERA_SIMD std::uint32_t AtLeastBits(Integers a, Integers b) {
    return BitsOf(_mm256_cmpeq_epi32(_mm256_max_epu32(a, b), a));
  }
  TESSERA_SIMD Integers AddWhere(std::uint32_t bits, Integers a, Integers b) {
    const Floats chosen = WhereBits(bits, _mm256_castsi256_ps(b), Zero());
    return _mm256_add_epi32(a, _mm256_castps_si256(chosen));
  }
  TESSERA_SIMD void StoreFlags(std::uint8_t* to, std::uint32_t bits) {
    // Moves bit i to byte i: the products of the low 7 bits never overlap.
    const std::uint64_t low = (bits & 0x7fu) * std::uint64_t{0x0002040810204081};
    const std::uint64_t flags = ((low | std::uint64_t{bits & 0x80u} << 49) & 0x0101010101010101);
    __builtin_memcpy(to, &flags, sizeof(flags));
  }
  TESSERA_SIMD std::uint32_t SumLanes(Integers a) {
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1));
    return static_cast<std::uint32_t>(_mm_cvtsi128_si32(sum));
  }
  TESSERA_SIMD Integers OrderedKey(Floats value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i sign = _mm256_srai_epi32(bits, 31);
    return _mm256_xor_si256(bits, _mm256_or_si256(sign, _mm256_set1_epi32(INT32_MIN)));
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
