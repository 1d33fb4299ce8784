// The vector vocabulary `Simd` on AVX-512 F, BW, DQ and VL. VBMI2 adds single-instruction expansion
// of 16- and 8-bit words, BF16 adds pair dot products.
//
// Compiled with AVX-512 flags, so everything has internal linkage: see ../README.md.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/simd/always_inline-inl.h"
#include "kernels/format/element.h"
#include "kernels/format/value_type.h"

namespace tessera::kernels {
namespace {

struct Simd {
#if defined(__AVX512BF16__)
  static constexpr char kName[] = "avx512bf16";
#elif defined(__AVX512VBMI2__)
  static constexpr char kName[] = "avx512vbmi2";
#else
  static constexpr char kName[] = "avx512";
#endif
  using Floats = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kRowGroup = 4;  // query rows that share one pass over a tile's registers

  // 2 * kLanes consecutive channels of a row as floats, in the order that is cheapest to produce:
  // (even, odd) channels for bf16, (first half, second half) otherwise. Queries and outputs use the
  // same order, so dot products are unaffected.
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
  // If either operand is NaN, these return the second one.
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

  // Restores channel order.
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

  // Sums the blocks of each input: lane 4 i + j is the total of row j of `blocks[i]`.
  TESSERA_SIMD Floats SumAcross(const Floats (&blocks)[kLanes / 4]) {
    const Floats t0 = Add(_mm512_shuffle_f32x4(blocks[0], blocks[1], 0x88),
                          _mm512_shuffle_f32x4(blocks[0], blocks[1], 0xdd));
    const Floats t1 = Add(_mm512_shuffle_f32x4(blocks[2], blocks[3], 0x88),
                          _mm512_shuffle_f32x4(blocks[2], blocks[3], 0xdd));
    return Add(_mm512_shuffle_f32x4(t0, t1, 0x88), _mm512_shuffle_f32x4(t0, t1, 0xdd));
  }

  // a in lanes whose bit is set, b in the others; bits beyond the lanes are ignored.
  TESSERA_SIMD Floats WhereBits(std::uint32_t bits, Floats a, Floats b) {
    return _mm512_mask_blend_ps(static_cast<__mmask16>(bits), b, a);
  }

  struct Exponent {
    Floats mantissa;  // in [sqrt(1/2), sqrt(2))
    Floats exponent;
  };
  TESSERA_SIMD Exponent SplitExponent(Floats value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i exponent =
        _mm512_srai_epi32(_mm512_sub_epi32(bits, _mm512_set1_epi32(0x3f3504f3)), 23);
    return {_mm512_castsi512_ps(_mm512_sub_epi32(bits, _mm512_slli_epi32(exponent, 23))),
            _mm512_cvtepi32_ps(exponent)};
  }
  // `log` where value > 0, -infinity at 0, NaN elsewhere.
  TESSERA_SIMD Floats LogOrLimit(Floats value, Floats log) {
    const __mmask16 positive = _mm512_cmp_ps_mask(value, Zero(), _CMP_GT_OQ);
    const __mmask16 zero = _mm512_cmp_ps_mask(value, Zero(), _CMP_EQ_OQ);
    const Floats limit =
        _mm512_mask_blend_ps(zero, Splat(__builtin_nanf("")), Splat(-__builtin_inff()));
    return _mm512_mask_blend_ps(positive, limit, log);
  }

  // 2^x for x <= 0: exactly 1 at 0, exactly 0 below 2^-126, relative error under 2^-23. Never
  // subnormal: see ../README.md.
  TESSERA_SIMD Floats Exp2(Floats x) {
    const __mmask16 normal = _mm512_cmp_ps_mask(x, Splat(-126.0f), _CMP_NLT_UQ);  // or NaN
    x = Max(Splat(-126.0f), x);
    const Floats whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm512_maskz_scalef_ps(normal, Exp2Fraction<Simd>(Subtract(x, whole)), whole);
  }

  // ---- packed rows: see expand-inl.h ----

  static constexpr int kStepChannels = 32;
  using Words = __m512i;  // kStepChannels 16-bit words

  TESSERA_SIMD Words ZeroWords() { return _mm512_setzero_si512(); }
  TESSERA_SIMD void StoreWords(std::byte* to, Words words) { _mm512_storeu_si512(to, words); }

  // On Zen 4 an expansion waits for the previous contents of its target register, even with {z}. A
  // fresh zero, hidden from the compiler, breaks the dependency and doubles the kernel's speed.
  TESSERA_SIMD __m512i FreshZero() {
    __m512i zero = _mm512_setzero_si512();
    asm("" : "+v"(zero));
    return zero;
  }

  // Converts small fp32 integers and fp8 values to bf16, exactly.
  TESSERA_SIMD Words ToBf16Words(Floats low, Floats high) {
#if defined(__AVX512BF16__)
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
#else
    const __m256i a = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(low), 16));
    const __m256i b = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(high), 16));
    return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
#endif
  }
  TESSERA_SIMD Words Int8ToBf16(__m256i bytes) {
    return ToBf16Words(
        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes))),
        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1))));
  }
  // An e4m3 number is an fp16 with its bits moved, times 2^8.
  TESSERA_SIMD Words Fp8ToBf16(__m256i bytes) {
    const __m512i wide = _mm512_cvtepu8_epi16(bytes);
    const __m512i half =
        _mm512_or_si512(_mm512_slli_epi16(_mm512_and_si512(wide, _mm512_set1_epi16(0x80)), 8),
                        _mm512_slli_epi16(_mm512_and_si512(wide, _mm512_set1_epi16(0x7f)), 7));
    const Floats factor = Splat(256.0f);
    return ToBf16Words(Multiply(_mm512_cvtph_ps(_mm512_castsi512_si256(half)), factor),
                       Multiply(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1)), factor));
  }

  // Moves the words of `packed` to the channels whose group's bit is set; one bit per group.
  template <int kGroup>
  TESSERA_SIMD Words Expand(std::uint32_t bits, __m512i packed) {
    if constexpr (kGroup == 4) {
      return _mm512_mask_expand_epi64(FreshZero(), static_cast<__mmask8>(bits), packed);
    } else if constexpr (kGroup == 2) {
      return _mm512_mask_expand_epi32(FreshZero(), static_cast<__mmask16>(bits), packed);
    } else {
#if defined(__AVX512VBMI2__)
      return _mm512_mask_expand_epi16(FreshZero(), bits, packed);
#else
      // Two halves of 32-bit lanes; the second starts after the words that the first has used.
      const int used = __builtin_popcount(bits & 0xffffu);
      const __m512i behind = _mm512_permutexvar_epi16(
          _mm512_add_epi16(Iota16(), _mm512_set1_epi16(static_cast<short>(used))),  // NOLINT
          packed);
      const __m256i low = _mm512_cvtepi32_epi16(
          _mm512_mask_expand_epi32(FreshZero(), static_cast<__mmask16>(bits),
                                   _mm512_cvtepu16_epi32(_mm512_castsi512_si256(packed))));
      const __m256i high = _mm512_cvtepi32_epi16(
          _mm512_mask_expand_epi32(FreshZero(), static_cast<__mmask16>(bits >> 16),
                                   _mm512_cvtepu16_epi32(_mm512_castsi512_si256(behind))));
      return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
#endif
    }
  }
  TESSERA_SIMD __m512i Iota16() {
    return _mm512_set_epi16(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14,
                            13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  }

  // The same for bytes.
  template <int kGroup>
  TESSERA_SIMD __m256i ExpandBytes(std::uint32_t bits, __m256i packed) {
    if constexpr (kGroup == 4) {
      return _mm256_mask_expand_epi32(_mm512_castsi512_si256(FreshZero()),
                                      static_cast<__mmask8>(bits), packed);
    } else {
#if defined(__AVX512VBMI2__)
      const __m256i zero = _mm512_castsi512_si256(FreshZero());
      if constexpr (kGroup == 2) {
        return _mm256_mask_expand_epi16(zero, static_cast<__mmask16>(bits), packed);
      } else {
        return _mm256_mask_expand_epi8(zero, bits, packed);
      }
#else
      if constexpr (kGroup == 2) {
        return _mm512_castsi512_si256(Expand<1>(bits & 0xffffu, _mm512_castsi256_si512(packed)));
      } else {
        return _mm512_cvtepi16_epi8(Expand<1>(bits, _mm512_cvtepu8_epi16(packed)));
      }
#endif
    }
  }

  // Keeps a load separate from the expansion that uses it. As one instruction they wait, on Zen 4,
  // twice as long for a line that is not in the cache.
  template <class Vector>
  TESSERA_SIMD Vector Apart(Vector loaded) {
    asm("" : "+v"(loaded));
    return loaded;
  }
  // Expands stored values at `from` into kStepChannels channels: 16-bit values unchanged, 8-bit
  // values as bf16. Reads at most 64 bytes.
  template <ValueType kValues, int kGroup>
  TESSERA_SIMD Words ExpandStep(std::uint32_t bits, const std::byte* from) {
    constexpr bool kWide = kValues == ValueType::kBf16 || kValues == ValueType::kFp16;
    if constexpr (kWide) {
      return Expand<kGroup>(bits, Apart(_mm512_loadu_si512(from)));
    } else {
      const auto* packed = reinterpret_cast<const __m256i*>(from);
      const __m256i bytes = ExpandBytes<kGroup>(bits, Apart(_mm256_loadu_si256(packed)));
      return kValues == ValueType::kInt8 ? Int8ToBf16(bytes) : Fp8ToBf16(bytes);
    }
  }
  TESSERA_SIMD void CopyStep(const std::byte* from, std::byte* to) {
    _mm512_storeu_si512(to, _mm512_loadu_si512(from));
  }

#if defined(__AVX512BF16__)
  // ---- pair dot products: see dot_engine-inl.h ----

  TESSERA_SIMD Words LoadWords(const std::byte* from) { return _mm512_loadu_si512(from); }
  // 32 floats to bf16, in order, rounded to nearest.
  TESSERA_SIMD Words RoundToBf16(Floats low, Floats high) {
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
  }
  TESSERA_SIMD bool AllFinite(Words words) {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    return _mm512_cmpeq_epi16_mask(_mm512_and_si512(words, exponent), exponent) == 0;
  }
  TESSERA_SIMD Words NanWords() { return _mm512_set1_epi16(0x7fff); }
  // Lane i: sum + a[2i] b[2i] + a[2i+1] b[2i+1].
  TESSERA_SIMD Floats AddPairDots(Floats sum, Words a, Words b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
  // The two words at `pair` in every lane.
  TESSERA_SIMD Words SplatPair(const float* pair) {
    return _mm512_castps_si512(_mm512_set1_ps(*pair));
  }
  // Alternates words of a and b from the lower (upper) half of each 128-bit block.
  TESSERA_SIMD Words InterleaveLow(Words a, Words b) { return _mm512_unpacklo_epi16(a, b); }
  TESSERA_SIMD Words InterleaveHigh(Words a, Words b) { return _mm512_unpackhi_epi16(a, b); }
  // ---- channels of stored values: see sparse_keys-inl.h ----

  // 0, kGroup, 2 kGroup, ...: the first channel of each group.
  template <int kGroup>
  struct FirstChannels {
    alignas(64) std::uint8_t of[128] = {};
    constexpr FirstChannels() {
      for (int i = 0; i < 128; ++i) of[i] = static_cast<std::uint8_t>(i * kGroup);
    }
  };
  // Writes the first channel of each group whose bit is set, one byte each, for at most 128 groups.
  // Writes kStored bytes, and for more than 64 groups again kStored bytes after the first groups'
  // bytes.
  template <int kGroup, int kGroups, int kStored>
  TESSERA_SIMD void StoreChannels(const std::byte* bits, std::byte* to) {
    static constexpr FirstChannels<kGroup> kFirst;
    std::uint64_t word = 0;
    __builtin_memcpy(&word, bits, kGroups < 64 ? kGroups / 8 : 8);
    StoreBytes<kStored>(to,
                        _mm512_mask_compress_epi8(FreshZero(), word, _mm512_load_si512(kFirst.of)));
    if constexpr (kGroups > 64) {
      to += __builtin_popcountll(word);
      __builtin_memcpy(&word, bits + 8, 8);
      StoreBytes<kStored>(
          to, _mm512_mask_compress_epi8(FreshZero(), word, _mm512_load_si512(kFirst.of + 64)));
    }
  }
  template <int kStored>
  TESSERA_SIMD void StoreBytes(std::byte* to, __m512i bytes) {
    if constexpr (kStored == 64) {
      _mm512_storeu_si512(to, bytes);
    } else {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(bytes));
    }
  }
  // The channels of 32 stored values, one byte each, from the bytes of their groups.
  template <int kGroup>
  TESSERA_SIMD __m256i LoadChannels(const std::byte* from) {
    if constexpr (kGroup == 1) {
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    } else if constexpr (kGroup == 2) {
      const __m256i first =
          _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
      return _mm256_or_si256(_mm256_or_si256(first, _mm256_slli_epi16(first, 8)),
                             _mm256_set1_epi16(0x0100));
    } else {
      const __m256i first =
          _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
      const __m256i two = _mm256_or_si256(first, _mm256_slli_epi32(first, 8));
      return _mm256_or_si256(_mm256_or_si256(two, _mm256_slli_epi32(two, 16)),
                             _mm256_set1_epi32(0x03020100));
    }
  }
  // The channels of two rows, alternating 8 of each, as PickPair expects them.
  template <int kGroup>
  TESSERA_SIMD Words LoadChannelPair(const std::byte* first, const std::byte* second) {
    const __m512i by_turns = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
    return _mm512_permutex2var_epi64(_mm512_castsi256_si512(LoadChannels<kGroup>(first)), by_turns,
                                     _mm512_castsi256_si512(LoadChannels<kGroup>(second)));
  }
  struct EveryOther {
    std::uint8_t of[64] = {};
    constexpr explicit EveryOther(int first) {
      for (int i = 0; i < 64; ++i) of[i] = static_cast<std::uint8_t>(2 * i + first);
    }
  };
  // Turns a row of kWords (64 or 128) words into a lookup table: all lower bytes, then all upper
  // bytes.
  template <int kWords>
  TESSERA_SIMD void SplitBytes(const std::byte* row, std::byte* table) {
    alignas(64) static constexpr EveryOther kEven(0);
    alignas(64) static constexpr EveryOther kOdd(1);
    for (int half = 0; half < kWords / 64; ++half, row += 128, table += 64) {
      const Words low = LoadWords(row);
      const Words high = LoadWords(row + 64);
      StoreWords(table, _mm512_permutex2var_epi8(low, _mm512_load_si512(kEven.of), high));
      StoreWords(table + kWords, _mm512_permutex2var_epi8(low, _mm512_load_si512(kOdd.of), high));
    }
  }
  struct WordsPair {
    Words a;
    Words b;
  };
  // Looks up words by index for two rows. Picking bytes of both rows at once takes half the
  // instructions of picking words, because two table registers hold what four would.
  template <int kWords>
  TESSERA_SIMD WordsPair PickPair(const std::byte* table, Words numbers) {
    Words low;
    Words high;
    if constexpr (kWords == 64) {
      low = _mm512_permutexvar_epi8(numbers, LoadWords(table));
      high = _mm512_permutexvar_epi8(numbers, LoadWords(table + 64));
    } else {
      low = _mm512_permutex2var_epi8(LoadWords(table), numbers, LoadWords(table + 64));
      high = _mm512_permutex2var_epi8(LoadWords(table + 128), numbers, LoadWords(table + 192));
    }
    return {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
  }
  // Loads stored values as words, 8-bit ones as bf16, if their bit is set. The others become zero
  // and are not read.
  template <ValueType kValues>
  TESSERA_SIMD Words LoadStored(const std::byte* from, std::uint32_t bits) {
    if constexpr (kValues == ValueType::kBf16) {
      return _mm512_maskz_loadu_epi16(bits, from);
    } else {
      const __m256i bytes = _mm256_maskz_loadu_epi8(bits, from);
      return kValues == ValueType::kInt8 ? Int8ToBf16(bytes) : Fp8ToBf16(bytes);
    }
  }
  // Restores channel order of sums over interleaved words.
  TESSERA_SIMD Pair InterleavedInOrder(Pair pair) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second =
        _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    return {_mm512_permutex2var_ps(pair.a, first, pair.b),
            _mm512_permutex2var_ps(pair.a, second, pair.b)};
  }
#endif

  // ---- packing rows: see pack_row-inl.h ----

  // Bit i is set if word i of 32 is greater. Words and limit are below 2^15.
  TESSERA_SIMD std::uint32_t GreaterBits(const std::uint16_t* words, std::uint32_t limit) {
    return _mm512_cmpgt_epi16_mask(_mm512_loadu_si512(words),
                                   _mm512_set1_epi16(static_cast<short>(limit)));  // NOLINT
  }
  TESSERA_SIMD std::uint32_t EqualBits(const std::uint16_t* words, std::uint32_t value) {
    return _mm512_cmpeq_epi16_mask(_mm512_loadu_si512(words),
                                   _mm512_set1_epi16(static_cast<short>(value)));  // NOLINT
  }
  // Expands one bit per group to one bit per channel, for kLanes channels.
  template <int kGroup>
  TESSERA_SIMD std::uint32_t ChannelBits(std::uint32_t bits) {
    if constexpr (kGroup == 1) return bits;
    if constexpr (kGroup == 2) {
      bits = (bits | bits << 4) & 0x0f0fu;
      bits = (bits | bits << 2) & 0x3333u;
      bits = (bits | bits << 1) & 0x5555u;
      return bits * 3u;
    }
    bits = (bits | bits << 6) & 0x0303u;
    bits = (bits | bits << 3) & 0x1111u;
    return bits * 15u;
  }
  // Stores the lanes whose bit is set contiguously; always writes a whole vector.
  TESSERA_SIMD void StoreCompressed(float* to, std::uint32_t bits, Floats value) {
    const Floats fresh = _mm512_castsi512_ps(FreshZero());
    Store(to, _mm512_mask_compress_ps(fresh, static_cast<__mmask16>(bits), value));
  }
  // `count` is a multiple of 16.
  TESSERA_SIMD void ToFp16(const float* from, int count, std::uint16_t* to) {
    for (int i = 0; i < count; i += 16) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i),
                          _mm512_cvtps_ph(Load(from + i), _MM_FROUND_TO_NEAREST_INT));
    }
  }

  // ---- choosing blocks: see select-inl.h ----

  using Integers = __m512i;  // kLanes 32-bit words

  TESSERA_SIMD Integers SplatInteger(std::uint32_t value) {
    return _mm512_set1_epi32(static_cast<int>(value));
  }
  TESSERA_SIMD Integers LoadIntegers(const std::uint32_t* from) { return _mm512_loadu_si512(from); }
  TESSERA_SIMD void StoreIntegers(std::uint32_t* to, Integers value) {
    _mm512_storeu_si512(to, value);
  }
  // Widens kLanes 16-bit words to 32 bits.
  TESSERA_SIMD Integers LoadHalfWords(const void* from) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
  }
  TESSERA_SIMD Integers AddIntegers(Integers a, Integers b) { return _mm512_add_epi32(a, b); }
  TESSERA_SIMD Integers And(Integers a, Integers b) { return _mm512_and_si512(a, b); }
  // One bit per lane: a is zero; a >= b as unsigned numbers.
  TESSERA_SIMD std::uint32_t ZeroBits(Integers a) { return _mm512_testn_epi32_mask(a, a); }
  TESSERA_SIMD std::uint32_t AtLeastBits(Integers a, Integers b) {
    return _mm512_cmpge_epu32_mask(a, b);
  }
  // a + b in lanes whose bit is set, a in the others.
  TESSERA_SIMD Integers AddWhere(std::uint32_t bits, Integers a, Integers b) {
    return _mm512_mask_add_epi32(a, static_cast<__mmask16>(bits), a, b);
  }
  // Writes kLanes bytes of 0 or 1.
  TESSERA_SIMD void StoreFlags(std::uint8_t* to, std::uint32_t bits) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     _mm_maskz_set1_epi8(static_cast<__mmask16>(bits), 1));
  }
  TESSERA_SIMD std::uint32_t SumLanes(Integers a) {
    return static_cast<std::uint32_t>(_mm512_reduce_add_epi32(a));
  }
  // An unsigned integer that orders like the float; NaN is above or below all numbers.
  TESSERA_SIMD Integers OrderedKey(Floats value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i sign = _mm512_srai_epi32(bits, 31);
    return _mm512_xor_si512(bits, _mm512_or_si512(sign, _mm512_set1_epi32(INT32_MIN)));
  }

  // The index of the first 16-bit (32-bit) word of one vector whose low 15 (31) bits are at least
  // `limit`, or -1.
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
