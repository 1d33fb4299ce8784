// Codes of the four rows of a quad, one byte each, and their words: see kernels/format/planes.h.
// Internal linkage throughout: see ../README.md.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attend/planes_dots-inl.h"

namespace tessera::kernels {
namespace {

constexpr int kQuadRowsHere = kQuadRows;

// One side (K or V) of a quad.
struct QuadCodes {
  alignas(64) std::uint8_t codes[kQuadRowsHere][kMaxHeadDim];
  std::uint16_t scales[kMaxPlanes][kQuadRowsHere];  // bf16
};

TESSERA_SIMD std::uint64_t LoadEight(const std::uint8_t* from) {
  std::uint64_t eight;
  __builtin_memcpy(&eight, from, sizeof(eight));
  return eight;
}
TESSERA_SIMD void StoreWord(std::byte* to, std::uint64_t word) {
  const auto low = static_cast<std::uint32_t>(word);
  __builtin_memcpy(to, &low, sizeof(low));
}
constexpr std::uint64_t kNibbles = 0x0f0f0f0f0f0f0f0f;
constexpr std::uint64_t kCrumbs = 0x0303030303030303;

// ---- keys: words of one row ----

// Bits [shift, shift + 4) of each code.
TESSERA_SIMD void WriteKeyNibbles(const std::uint8_t* codes, int channels, int shift, int row,
                                  std::byte* to) {
  for (int c = 0; c < channels; c += 8) {
    const std::uint64_t eight = LoadEight(codes + c) >> shift & kNibbles;
    StoreWord(to + (c / 8 * kQuadRowsHere + row) * 4, eight | eight >> 28);
  }
}
TESSERA_SIMD void WriteKeyCrumbs(const std::uint8_t* codes, int channels, int row, std::byte* to) {
  for (int c = 0; c < channels; c += 16) {
    const std::uint64_t a = LoadEight(codes + c) & kCrumbs;
    const std::uint64_t b = LoadEight(codes + c + 8) & kCrumbs;
    StoreWord(to + (c / 16 * kQuadRowsHere + row) * 4, (a | a >> 30) | (b | b >> 30) << 4);
  }
}
TESSERA_SIMD void WriteKeyBytes(const std::uint8_t* codes, int channels, int row, std::byte* to) {
  for (int c = 0; c < channels; c += 4) {
    __builtin_memcpy(to + (c + row) * 4, codes + c, 4);
  }
}

// ---- values: words of four rows ----

struct FourRows {
  __m128i row[kQuadRowsHere];
};
TESSERA_SIMD FourRows LoadFour(const QuadCodes& quad, int channel) {
  FourRows four;
  for (int r = 0; r < kQuadRowsHere; ++r) {
    four.row[r] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(quad.codes[r] + channel));
  }
  return four;
}
TESSERA_SIMD void StoreSixteen(std::byte* to, __m128i value) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), value);
}

TESSERA_SIMD void WriteValueNibbles(const QuadCodes& quad, int first, int channels, int shift,
                                    std::byte* to) {
  const __m128i nibbles = _mm_set1_epi8(15);
  const __m128i low_byte = _mm_set1_epi16(0xff);
  for (int c = 0; c < channels; c += 16, to += 32) {
    FourRows four = LoadFour(quad, first + c);
    TESSERA_UNROLL for (auto& row : four.row) {
      row = _mm_and_si128(_mm_srli_epi16(row, shift), nibbles);
      row = _mm_and_si128(_mm_or_si128(row, _mm_srli_epi16(row, 4)), low_byte);
    }
    const __m128i a = _mm_or_si128(four.row[0], _mm_slli_epi16(four.row[1], 8));
    const __m128i b = _mm_or_si128(four.row[2], _mm_slli_epi16(four.row[3], 8));
    StoreSixteen(to, _mm_unpacklo_epi16(a, b));
    StoreSixteen(to + 16, _mm_unpackhi_epi16(a, b));
  }
}
TESSERA_SIMD void WriteValueCrumbs(const QuadCodes& quad, int first, int channels, std::byte* to) {
  const __m128i crumbs = _mm_set1_epi8(3);
  const __m128i low_byte = _mm_set1_epi32(0xff);
  for (int c = 0; c < channels; c += 16, to += 16) {
    FourRows four = LoadFour(quad, first + c);
    TESSERA_UNROLL for (auto& row : four.row) {
      const __m128i x = _mm_and_si128(row, crumbs);
      const __m128i low = _mm_or_si128(x, _mm_srli_epi32(x, 6));
      const __m128i high = _mm_or_si128(_mm_srli_epi32(x, 12), _mm_srli_epi32(x, 18));
      row = _mm_and_si128(_mm_or_si128(low, high), low_byte);
    }
    const __m128i a = _mm_or_si128(four.row[0], _mm_slli_epi32(four.row[1], 8));
    const __m128i b =
        _mm_or_si128(_mm_slli_epi32(four.row[2], 16), _mm_slli_epi32(four.row[3], 24));
    StoreSixteen(to, _mm_or_si128(a, b));
  }
}
TESSERA_SIMD void WriteValueBytes(const QuadCodes& quad, int first, int channels, std::byte* to) {
  for (int c = 0; c < channels; c += 16, to += 64) {
    const FourRows four = LoadFour(quad, first + c);
    const __m128i a = _mm_unpacklo_epi8(four.row[0], four.row[1]);
    const __m128i b = _mm_unpacklo_epi8(four.row[2], four.row[3]);
    const __m128i d = _mm_unpackhi_epi8(four.row[0], four.row[1]);
    const __m128i e = _mm_unpackhi_epi8(four.row[2], four.row[3]);
    StoreSixteen(to, _mm_unpacklo_epi16(a, b));
    StoreSixteen(to + 16, _mm_unpackhi_epi16(a, b));
    StoreSixteen(to + 32, _mm_unpacklo_epi16(d, e));
    StoreSixteen(to + 48, _mm_unpackhi_epi16(d, e));
  }
}

// Writes one side's words and scales.
TESSERA_SIMD void WriteQuadSide(const QuadSide& side, bool keys, const QuadCodes& quad,
                                std::byte* to) {
  int first = 0;
  for (int p = 0; p < side.planes; ++p) {
    const QuadPlane& plane = side.plane[p];
    std::byte* words = to + plane.array[0].offset;
    std::byte* crumbs = to + plane.array[plane.arrays - 1].offset;
    const int shift = plane.width == 6 ? 2 : 0;
    for (int r = 0; keys && r < kQuadRowsHere; ++r) {
      const std::uint8_t* codes = quad.codes[r] + first;
      if (plane.width == 8) WriteKeyBytes(codes, plane.channels, r, words);
      if (plane.width == 4 || plane.width == 6) {
        WriteKeyNibbles(codes, plane.channels, shift, r, words);
      }
      if (plane.width == 2 || plane.width == 6) WriteKeyCrumbs(codes, plane.channels, r, crumbs);
    }
    if (!keys) {
      if (plane.width == 8) WriteValueBytes(quad, first, plane.channels, words);
      if (plane.width == 4 || plane.width == 6) {
        WriteValueNibbles(quad, first, plane.channels, shift, words);
      }
      if (plane.width == 2 || plane.width == 6) {
        WriteValueCrumbs(quad, first, plane.channels, crumbs);
      }
    }
    __builtin_memcpy(to + side.scales + 8 * p, quad.scales[p], 8);
    first += plane.channels;
  }
}

// ---- reading ----

// Bits `bits` wide of one channel of a row.
TESSERA_SIMD std::uint32_t ReadField(const QuadArray& array, bool keys, const std::byte* quad,
                                     int row, int channel) {
  const int bits = array.bits;
  const int per_word = keys ? 32 / bits : 8 / bits;
  const int within = channel % per_word;
  const int byte = keys ? (channel / per_word * kQuadRowsHere + row) * 4 + within % 4
                        : channel / per_word * 4 + row;
  const int shift = (keys ? within / 4 : within) * bits;
  return static_cast<std::uint32_t>(quad[array.offset + static_cast<std::uint32_t>(byte)]) >>
             shift &
         ((1u << bits) - 1);
}

// Reads the codes and scales of one row of a quad.
TESSERA_PER_PASS void ReadQuadRow(const QuadSide& side, bool keys, const std::byte* quad, int row,
                                  std::uint8_t* codes, std::uint16_t* scales) {
  for (int p = 0; p < side.planes; ++p) {
    const QuadPlane& plane = side.plane[p];
    for (int c = 0; c < plane.channels; ++c, ++codes) {
      std::uint32_t code = ReadField(plane.array[0], keys, quad, row, c);
      if (plane.width == 6) code = code << 2 | ReadField(plane.array[1], keys, quad, row, c);
      *codes = static_cast<std::uint8_t>(code);
    }
    __builtin_memcpy(scales + p, quad + side.scales + 8 * p + 2 * row, 2);
  }
}

TESSERA_SIMD float FromBf16(std::uint16_t bits) {
  return __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) << 16);
}
// Nearest, ties to even; the value is finite.
TESSERA_SIMD std::uint16_t ToBf16(float value) {
  const auto bits = __builtin_bit_cast(std::uint32_t, value);
  return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

TESSERA_PER_PASS void DecodeQuadRow(const QuadSide& side, bool keys, const std::byte* quad, int row,
                                    float* to) {
  std::uint8_t codes[kMaxHeadDim];
  std::uint16_t scales[kMaxPlanes];
  ReadQuadRow(side, keys, quad, row, codes, scales);
  int first = 0;
  for (int p = 0; p < side.planes; ++p) {
    const QuadPlane& plane = side.plane[p];
    const float scale = FromBf16(scales[p]);
    for (int c = first; c < first + plane.channels; ++c) {
      to[c] = scale * (static_cast<float>(codes[c]) - plane.centre);
    }
    first += plane.channels;
  }
}

// Copies a row's codes, shifted to the widths of `to`.
TESSERA_PER_PASS void CopyQuadRow(const QuadSide& from, const std::byte* quad, int row, bool keys,
                                  const QuadSide& to, int to_row, QuadCodes& copied) {
  std::uint16_t scales[kMaxPlanes];
  std::uint8_t* codes = copied.codes[to_row];
  ReadQuadRow(from, keys, quad, row, codes, scales);
  for (int p = 0; p < to.planes; ++p) {
    const int dropped = from.plane[p].width - to.plane[p].width;
    copied.scales[p][to_row] = ToBf16(FromBf16(scales[p]) * static_cast<float>(1 << dropped));
    for (int c = 0; dropped != 0 && c < to.plane[p].channels; ++c) {
      codes[c] = static_cast<std::uint8_t>(codes[c] >> dropped);
    }
    codes += to.plane[p].channels;
  }
}

}  // namespace
}  // namespace tessera::kernels
