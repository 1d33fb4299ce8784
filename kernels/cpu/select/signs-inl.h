// Scores quads by the sign index of their keys. Written over the including file's `Simd`, with
// 256-bit vectors on every instruction set. Internal linkage throughout: see ../README.md.
//
//   per query row   codes of the first plane; per 4 channels a table of the sums of +-code for the
//                   16 combinations of signs, as low and high bytes
//   per tile        the sign bits, turned from [row][byte] to [byte][row]
//   score           16-bit sums of table entries, times the norms; the largest of each quad
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

struct SignScratch {
  alignas(64) SignTable tables[kMaxPartRows][2 * kMaxSignBytes];
  float inverse_length[kMaxPartRows];
  alignas(64) float norms[kTileRows];
};

// 2^(k / 8 - 16), and 0 for k = 0.
struct SignNorms {
  float value[256];
};
constexpr SignNorms MakeSignNorms() {
  constexpr double kEighths[8] = {1.0,
                                  1.0905077326652577,
                                  1.189207115002721,
                                  1.2968395546510096,
                                  1.4142135623730951,
                                  1.5422108254079407,
                                  1.681792830507429,
                                  1.8340080864093424};
  SignNorms norms = {};
  for (int k = 1; k < 256; ++k) {
    double norm = kEighths[k % 8];
    for (int e = k / 8; e < 16; ++e) norm *= 0.5;
    for (int e = 16; e < k / 8; ++e) norm *= 2;
    norms.value[k] = static_cast<float>(norm);
  }
  return norms;
}
alignas(64) constexpr SignNorms kSignNorms = MakeSignNorms();

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
      tables[n].low[signs] = static_cast<std::uint8_t>(sum);
      tables[n].high[signs] = static_cast<std::uint8_t>(sum >> 8);
    }
  }
}

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
TESSERA_SIMD void LoadSigns(const std::byte* bits, __m256i (&bytes)[kBytes]) {
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

// The sums of one query row with the signs of 32 rows, in four vectors of eight.
struct SignSums {
  __m256 eight[4];
};
template <int kBytes>
TESSERA_SIMD SignSums SumSigns(const SignTable* tables, const __m256i (&bytes)[kBytes]) {
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

TESSERA_SIMD void ReadNorms(const std::byte* from, SignScratch& scratch) {
  for (int r = 0; r < kTileRows; ++r) {
    scratch.norms[r] = kSignNorms.value[static_cast<std::uint8_t>(from[r])];
  }
}

template <int kBytes>
static void ScoreSignsOf(const ScorePart& part, SignScratch& scratch) {
  std::uint64_t at = 0;
  for (std::uint32_t i = 0; i < part.run_count; ++i) {
    const BlockRun& run = part.runs[i];
    __m256i bytes[kBytes];
    LoadSigns<kBytes>(run.summaries + part.layout.block_bits, bytes);
    const std::uint32_t rows = (run.blocks - 1) * kQuadRows + run.last_entries;
    ReadNorms(run.summaries + part.layout.block_data, scratch);
    for (std::uint32_t r = 0; r < part.row_count; ++r) {
      const SignSums sums = SumSigns<kBytes>(scratch.tables[r], bytes);
      const __m256 inverse = _mm256_set1_ps(scratch.inverse_length[r]);
      __m256 value[4];
      TESSERA_UNROLL for (int v = 0; v < 4; ++v) {
        value[v] = _mm256_mul_ps(_mm256_mul_ps(sums.eight[v], inverse),
                                 _mm256_load_ps(scratch.norms + 8 * v));
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
