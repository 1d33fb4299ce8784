// Scores quads by the sign index of their keys. Internal linkage throughout: see ../README.md.
//
//   per query row   codes of the first plane; per 4 channels a table of the sums of +-code for the
//                   16 combinations of signs, as low and high bytes
//   score           sums of table entries, times the norms; the largest of each quad
//
// With VBMI, vpermb looks up the four bytes of a word in a table of 64 entries. Without it, the
// sign bits of a tile are first turned from [row][byte] to [byte][row] for byte shuffles of 256
// bits.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attend/attend_planes-inl.h"
#include "kernels/format/part.h"

namespace tessera::kernels {
namespace {

constexpr int kMaxSignBytes = kMaxHeadDim / 16;

struct SignTable {
  std::uint8_t low[16];
  std::uint8_t high[16];
};
// With VBMI: the tables of one nibble of a word's four bytes.
struct WordTable {
  std::uint8_t low[64];
  std::uint8_t high[64];
};
static_assert(sizeof(WordTable) == 4 * sizeof(SignTable));

struct SignScratch {
  alignas(64) SignTable tables[kMaxPartRows][2 * kMaxSignBytes];
  float inverse_length[kMaxPartRows];
};

// Writes the sum of 4 signed codes for combination `signs` of nibble n.
TESSERA_SIMD void StoreSum(SignTable* tables, int n, int signs, int sum) {
#if defined(__AVX512VBMI__)
  auto* words = reinterpret_cast<WordTable*>(tables);
  WordTable& table = words[n / 8 * 2 + n % 2];
  const int at = n / 2 % 4 * 16 + signs;
  table.low[at] = static_cast<std::uint8_t>(sum);
  table.high[at] = static_cast<std::uint8_t>(sum >> 8);
#else
  tables[n].low[signs] = static_cast<std::uint8_t>(sum);
  tables[n].high[signs] = static_cast<std::uint8_t>(sum >> 8);
#endif
}

TESSERA_PER_PASS void MakeSignTables(const float* query, int channels, SignTable* tables,
                                     float& inverse_length) {
  std::int8_t codes[kMaxHeadDim];
  RoundPlane(query, channels, codes);
  int squares = 0;
  for (int c = 0; c < channels; ++c) squares += codes[c] * codes[c];
  inverse_length =
      squares > 0 ? static_cast<float>(1 / __builtin_sqrt(static_cast<double>(squares))) : 1.0f;
  for (int n = 0; n < channels / 4; ++n) {
    const std::int8_t* four = codes + 4 * n;
    for (int signs = 0; signs < 16; ++signs) {
      int sum = 0;
      for (int i = 0; i < 4; ++i) sum += (signs >> i & 1) != 0 ? four[i] : -four[i];
      StoreSum(tables, n, signs, sum);
    }
  }
}

// 2^(k / 8 - 16) for eight bytes k, 0 for k = 0: the exponent is added to the bits of 2^(k % 8 /
// 8).
TESSERA_SIMD __m256 NormsOf(const std::byte* from) {
  const __m256 eighths = _mm256_setr_ps(1.0f, 1.09050773f, 1.18920712f, 1.29683955f, 1.41421356f,
                                        1.54221083f, 1.68179283f, 1.83400809f);
  const __m256i k = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  const __m256i fraction = _mm256_castps_si256(
      _mm256_permutevar8x32_ps(eighths, _mm256_and_si256(k, _mm256_set1_epi32(7))));
  const __m256i exponent =
      _mm256_slli_epi32(_mm256_sub_epi32(_mm256_srli_epi32(k, 3), _mm256_set1_epi32(16)), 23);
  const __m256i none = _mm256_cmpeq_epi32(k, _mm256_setzero_si256());
  return _mm256_castsi256_ps(_mm256_andnot_si256(none, _mm256_add_epi32(fraction, exponent)));
}

// The sums of one query row with the signs of 32 rows, in four vectors of eight.
struct SignSums {
  __m256 eight[4];
};

#if defined(__AVX512VBMI__)

// The words of 16 rows: word w of every row.
template <int kBytes>
struct SignWords {
  static constexpr int kWords = kBytes / 4;
  __m512i low[2][kWords];   // indices of the lower nibbles' tables, per 16 rows
  __m512i high[2][kWords];  // of the upper nibbles'
};

template <int kBytes>
TESSERA_SIMD void LoadSigns(const std::byte* bits, SignWords<kBytes>& signs) {
  constexpr int kWords = kBytes / 4;
  const __m512i iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i nibble = _mm512_set1_epi8(15);
  const __m512i byte = _mm512_set1_epi32(0x30201000);
  TESSERA_UNROLL for (int half = 0; half < 2; ++half) {
    const std::byte* from = bits + half * 16 * kBytes;
    TESSERA_UNROLL for (int w = 0; w < kWords; ++w) {
      __m512i words;
      if constexpr (kWords == 1) {
        words = _mm512_loadu_si512(from);
      } else if constexpr (kWords == 2) {
        const __m512i index = _mm512_add_epi32(_mm512_add_epi32(iota, iota), _mm512_set1_epi32(w));
        words = _mm512_permutex2var_epi32(_mm512_loadu_si512(from), index,
                                          _mm512_loadu_si512(from + 64));
      } else {
        const __m512i index = _mm512_add_epi32(_mm512_slli_epi32(iota, 2), _mm512_set1_epi32(w));
        const __m512i first = _mm512_permutex2var_epi32(_mm512_loadu_si512(from), index,
                                                        _mm512_loadu_si512(from + 64));
        const __m512i second = _mm512_permutex2var_epi32(_mm512_loadu_si512(from + 128), index,
                                                         _mm512_loadu_si512(from + 192));
        words = _mm512_inserti64x4(first, _mm512_castsi512_si256(second), 1);
      }
      signs.low[half][w] = _mm512_or_si512(_mm512_and_si512(words, nibble), byte);
      signs.high[half][w] =
          _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(words, 4), nibble), byte);
    }
  }
}

template <int kBytes>
TESSERA_SIMD SignSums SumSigns(const SignTable* tables, const SignWords<kBytes>& signs) {
  const auto* words = reinterpret_cast<const WordTable*>(tables);
  const __m512i ones = _mm512_set1_epi8(1);
  SignSums sums;
  TESSERA_UNROLL for (int half = 0; half < 2; ++half) {
    __m512i low = _mm512_setzero_si512();
    __m512i high = _mm512_setzero_si512();
    TESSERA_UNROLL for (int w = 0; w < SignWords<kBytes>::kWords; ++w) {
      TESSERA_UNROLL for (int n = 0; n < 2; ++n) {
        const WordTable& table = words[2 * w + n];
        const __m512i index = n == 0 ? signs.low[half][w] : signs.high[half][w];
        low = _mm512_dpbusd_epi32(low, _mm512_permutexvar_epi8(index, _mm512_load_si512(table.low)),
                                  ones);
        high = _mm512_dpbusd_epi32(high, ones,
                                   _mm512_permutexvar_epi8(index, _mm512_load_si512(table.high)));
      }
    }
    const __m512 sum = _mm512_cvtepi32_ps(_mm512_add_epi32(low, _mm512_slli_epi32(high, 8)));
    sums.eight[2 * half] = _mm512_castps512_ps256(sum);
    sums.eight[2 * half + 1] = _mm512_extractf32x8_ps(sum, 1);
  }
  return sums;
}

#else

template <int kBytes>
struct SignWords {
  __m256i bytes[kBytes];  // [byte][32 rows]
};

TESSERA_SIMD __m256i EvenBytes(__m256i a, __m256i b) {
  const __m256i low = _mm256_set1_epi16(0xff);
  return _mm256_permute4x64_epi64(
      _mm256_packus_epi16(_mm256_and_si256(a, low), _mm256_and_si256(b, low)), 0xd8);
}
TESSERA_SIMD __m256i OddBytes(__m256i a, __m256i b) {
  return _mm256_permute4x64_epi64(
      _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8)), 0xd8);
}

// Loads [32 rows][kBytes] as [kBytes][32 rows]: each step splits even bytes from odd ones.
template <int kBytes>
TESSERA_SIMD void LoadSigns(const std::byte* bits, SignWords<kBytes>& signs) {
  __m256i(&bytes)[kBytes] = signs.bytes;
  __m256i split[kBytes];
  TESSERA_UNROLL for (int i = 0; i < kBytes; ++i) {
    bytes[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bits) + i);
  }
  // Before a step there are `streams` streams of `length` vectors, one after the other.
  for (int streams = 1; streams < kBytes; streams *= 2) {
    const int length = kBytes / streams;
    for (int s = 0; s < streams; ++s) {
      for (int i = 0; i < length / 2; ++i) {
        const __m256i a = bytes[s * length + 2 * i];
        const __m256i b = bytes[s * length + 2 * i + 1];
        split[s * (length / 2) + i] = EvenBytes(a, b);
        split[(s + streams) * (length / 2) + i] = OddBytes(a, b);
      }
    }
    for (int i = 0; i < kBytes; ++i) bytes[i] = split[i];
  }
}

template <int kBytes>
TESSERA_SIMD SignSums SumSigns(const SignTable* tables, const SignWords<kBytes>& signs) {
  const __m256i(&bytes)[kBytes] = signs.bytes;
  const __m256i nibble = _mm256_set1_epi8(15);
  __m256i first = _mm256_setzero_si256();   // rows 0 .. 7 and 16 .. 23
  __m256i second = _mm256_setzero_si256();  // rows 8 .. 15 and 24 .. 31
  TESSERA_UNROLL for (int i = 0; i < kBytes; ++i) {
    TESSERA_UNROLL for (int half = 0; half < 2; ++half) {
      const SignTable& table = tables[2 * i + half];
      const __m256i index =
          _mm256_and_si256(half == 0 ? bytes[i] : _mm256_srli_epi16(bytes[i], 4), nibble);
      const __m256i low = _mm256_shuffle_epi8(
          _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table.low))),
          index);
      const __m256i high = _mm256_shuffle_epi8(
          _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table.high))),
          index);
      first = _mm256_add_epi16(first, _mm256_unpacklo_epi8(low, high));
      second = _mm256_add_epi16(second, _mm256_unpackhi_epi8(low, high));
    }
  }
  const auto widen = [](__m128i words) TESSERA_INLINE_LAMBDA {
    return _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(words));
  };
  return {{widen(_mm256_castsi256_si128(first)), widen(_mm256_castsi256_si128(second)),
           widen(_mm256_extracti128_si256(first, 1)), widen(_mm256_extracti128_si256(second, 1))}};
}

#endif

// Stores the largest of each four values.
TESSERA_SIMD void StoreLargest(const __m256 (&value)[4], float* to) {
  const auto largest = [](__m256 a, __m256 b) TESSERA_INLINE_LAMBDA {
    return _mm256_max_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));
  };
  // Quads 0, 2, 4, 6 in the lower half, 1, 3, 5, 7 in the upper.
  const __m256 quads = largest(largest(value[0], value[1]), largest(value[2], value[3]));
  const __m128 even = _mm256_castps256_ps128(quads);
  const __m128 odd = _mm256_extractf128_ps(quads, 1);
  _mm_storeu_ps(to, _mm_unpacklo_ps(even, odd));
  _mm_storeu_ps(to + 4, _mm_unpackhi_ps(even, odd));
}

template <int kBytes>
static void ScoreSignsOf(const ScorePart& part, SignScratch& scratch) {
  std::uint64_t at = 0;
  for (std::uint32_t i = 0; i < part.run_count; ++i) {
    const BlockRun& run = part.runs[i];
    SignWords<kBytes> signs;
    LoadSigns<kBytes>(run.summaries + part.layout.block_bits, signs);
    const std::uint32_t rows = (run.blocks - 1) * kQuadRows + run.last_entries;
    __m256 norms[4];
    TESSERA_UNROLL for (int v = 0; v < 4; ++v) {
      norms[v] = NormsOf(run.summaries + part.layout.block_data + 8 * v);
    }
    for (std::uint32_t r = 0; r < part.row_count; ++r) {
      const SignSums sums = SumSigns<kBytes>(scratch.tables[r], signs);
      const __m256 inverse = _mm256_set1_ps(scratch.inverse_length[r]);
      __m256 value[4];
      TESSERA_UNROLL for (int v = 0; v < 4; ++v) {
        value[v] = _mm256_mul_ps(_mm256_mul_ps(sums.eight[v], inverse), norms[v]);
      }
      float* scores = part.scores + r * part.score_stride + at;
      if (rows == kTileRows) {
        StoreLargest(value, scores);
        continue;
      }
      alignas(32) float all[kTileRows];
      TESSERA_UNROLL for (int v = 0; v < 4; ++v) _mm256_store_ps(all + 8 * v, value[v]);
      for (std::uint32_t dead = rows; dead < kTileRows; ++dead) all[dead] = -kInfinity;
      TESSERA_UNROLL for (int v = 0; v < 4; ++v) value[v] = _mm256_load_ps(all + 8 * v);
      alignas(32) float quads[kQuads];
      StoreLargest(value, quads);
      __builtin_memcpy(scores, quads, run.blocks * sizeof(float));
    }
    at += run.blocks;
  }
}

static void ScoreSigns(const ScorePart& part) {
  SignScratch scratch;
  const int channels = part.shape.head_dim / 2;
  for (std::uint32_t r = 0; r < part.row_count; ++r) {
    MakeSignTables(part.rows + static_cast<std::size_t>(r) * part.padded_channels, channels,
                   scratch.tables[r], scratch.inverse_length[r]);
  }
  switch (part.shape.head_dim) {
    case 64:
      return ScoreSignsOf<4>(part, scratch);
    case 128:
      return ScoreSignsOf<8>(part, scratch);
    default:
      return ScoreSignsOf<16>(part, scratch);
  }
}

}  // namespace
}  // namespace tessera::kernels
