// Integer products over quads of the planes format: keys with int8 queries, values with 8-bit
// weights. Written over the including file's `ByteSimd`. Internal linkage throughout: see
// ../README.md.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attend/tile_math-inl.h"
#include "kernels/format/part.h"

namespace tessera::kernels {
namespace {

constexpr int kQuads = kTileQuads;
constexpr int kMostHeads = 4;  // query rows that share one pass over a batch of quads

// One array of words in a quad: codes of 8, 4 or 2 bits of one plane.
struct QuadArray {
  std::uint32_t offset;  // in the quad
  int vectors;
  bool half;     // its only vector is half full
  int parts;     // fields of a byte, one vector of products each
  int bits;      // of a field
  int first;     // vector of this array among all arrays' products
  float factor;  // of a code's upper bits
};

// The arrays of one side's plane: one, or two if its width is 6.
struct QuadPlane {
  int width;
  int channels;
  int arrays;
  QuadArray array[2];
  float centre;
};

struct QuadSide {
  int planes;
  int vectors;  // vectors of products of all arrays
  std::uint32_t scales;
  QuadPlane plane[kMaxPlanes];
};

TESSERA_SIMD QuadArray ArrayOf(std::uint32_t offset, int channels, int bits, bool keys,
                               int& vectors) {
  const int bytes = channels * bits / 2;
  // A byte of 8 bits is multiplied as two nibbles; over keys both meet the same query vector.
  const int parts = bits == 8 ? 2 : 8 / bits;
  QuadArray array = {.offset = offset,
                     .vectors = (bytes + ByteSimd::kBytes - 1) / ByteSimd::kBytes,
                     .half = bytes < ByteSimd::kBytes,
                     .parts = parts,
                     .bits = bits,
                     .first = vectors,
                     .factor = 1};
  vectors += array.vectors * (keys && bits == 8 ? 1 : parts);
  return array;
}

TESSERA_SIMD QuadSide SideOf(const TileShape& shape, const TileLayout& layout, bool keys) {
  const PlaneWidths& widths = keys ? shape.key_planes : shape.value_planes;
  QuadSide side = {};
  side.planes = widths.second == 0 ? 1 : 2;
  side.scales = keys ? layout.quad.key_scales : layout.quad.value_scales;
  for (int p = 0; p < side.planes; ++p) {
    QuadPlane& plane = side.plane[p];
    const std::uint32_t words = keys ? layout.quad.key[p] : layout.quad.value[p];
    plane.width = p == 0 ? widths.first : widths.second;
    plane.channels = shape.head_dim / side.planes;
    plane.centre = static_cast<float>((1 << plane.width) - 1) * 0.5f;
    plane.arrays = plane.width == 6 ? 2 : 1;
    plane.array[0] =
        ArrayOf(words, plane.channels, plane.width == 6 ? 4 : plane.width, keys, side.vectors);
    if (plane.width != 6) continue;
    plane.array[0].factor = 4;
    plane.array[1] = ArrayOf(words + static_cast<std::uint32_t>(plane.channels) * 2, plane.channels,
                             2, keys, side.vectors);
  }
  return side;
}

// The channel of field `part` of word `word`; over keys the first of four.
TESSERA_SIMD int ChannelOf(const QuadArray& array, bool keys, int word, int part) {
  if (array.bits == 8) return keys ? 4 * word : word;
  return keys ? 4 * (array.parts * word + part) : array.parts * word + part;
}

TESSERA_SIMD typename ByteSimd::Bytes LoadWords(const QuadArray& array, const std::byte* quad,
                                                int vector) {
  const std::byte* at = quad + array.offset + vector * ByteSimd::kBytes;
  return array.half ? ByteSimd::LoadHalf(at) : ByteSimd::Load(at);
}

template <int kBits, int kPart>
TESSERA_SIMD typename ByteSimd::Bytes FieldOf(typename ByteSimd::Bytes bytes) {
  if constexpr (kBits == 2) {
    return ByteSimd::Crumb<2 * kPart>(bytes);
  } else {
    return ByteSimd::Nibble<4 * kPart>(bytes);
  }
}

// ---- keys ----

template <int kHeads>
using KeySums = typename ByteSimd::Ints[kHeads][ByteSimd::kQuadsAtOnce];

// total[h][j] += the products of fields [kFirst, kFirst + kParts) of the array's words with their
// query vectors, for quads j.
template <int kBits, int kFirst, int kParts, int kHeads>
TESSERA_SIMD void AddKeyArray(const QuadArray& array, const std::byte* const* quads,
                              const std::int8_t* queries, std::size_t stride,
                              KeySums<kHeads>& total) {
  constexpr int kQ = ByteSimd::kQuadsAtOnce;
  constexpr int kChunk = ByteSimd::kMostKeyProducts / kParts;
  constexpr int kQueryParts = kBits == 8 ? 1 : kParts;
  queries += array.first * ByteSimd::kBytes;
  for (int done = 0; done < array.vectors; done += kChunk) {
    const int end = array.vectors - done < kChunk ? array.vectors : done + kChunk;
    typename ByteSimd::Sums sums[kHeads][kQ];
    TESSERA_UNROLL for (int h = 0; h < kHeads; ++h) {
      TESSERA_UNROLL for (int j = 0; j < kQ; ++j) sums[h][j] = ByteSimd::Begin(total[h][j]);
    }
    for (int v = done; v < end; ++v) {
      typename ByteSimd::Bytes words[kQ];
      TESSERA_UNROLL for (int j = 0; j < kQ; ++j) words[j] = LoadWords(array, quads[j], v);
      const auto add = [&]<int kPart>() TESSERA_INLINE_LAMBDA {
        typename ByteSimd::Bytes query[kHeads];
        constexpr int kQueryPart = kBits == 8 ? 0 : kPart;
        TESSERA_UNROLL for (int h = 0; h < kHeads; ++h) {
          query[h] = ByteSimd::Load(queries + static_cast<std::size_t>(h) * stride +
                                    (v * kQueryParts + kQueryPart) * ByteSimd::kBytes);
        }
        TESSERA_UNROLL for (int j = 0; j < kQ; ++j) {
          const auto codes = FieldOf<kBits, kFirst + kPart>(words[j]);
          TESSERA_UNROLL for (int h = 0; h < kHeads; ++h) {
            sums[h][j] = ByteSimd::AddProducts(sums[h][j], codes, query[h]);
          }
        }
      };
      add.template operator()<0>();
      if constexpr (kParts > 1) add.template operator()<1>();
      if constexpr (kParts > 2) add.template operator()<2>();
      if constexpr (kParts > 3) add.template operator()<3>();
    }
    TESSERA_UNROLL for (int h = 0; h < kHeads; ++h) {
      TESSERA_UNROLL for (int j = 0; j < kQ; ++j) {
        total[h][j] = ByteSimd::Finish(total[h][j], sums[h][j]);
      }
    }
  }
}

template <int kBits, int kHeads>
TESSERA_SIMD void ShiftSums(KeySums<kHeads>& total) {
  TESSERA_UNROLL for (int h = 0; h < kHeads; ++h) {
    TESSERA_UNROLL for (int j = 0; j < ByteSimd::kQuadsAtOnce; ++j) {
      total[h][j] = ByteSimd::ShiftLeft<kBits>(total[h][j]);
    }
  }
}

// dots[h][row] = sum of codes x query codes over one plane, for the 32 rows of eight quads.
template <int kWidth, int kHeads>
static void DotPlane(const QuadPlane& plane, const std::byte* const* quads,
                     const std::int8_t* queries, std::size_t stride,
                     std::int32_t (*dots)[kTileRows]) {
  constexpr int kQ = ByteSimd::kQuadsAtOnce;
  for (int first = 0; first < kQuads; first += kQ) {
    KeySums<kHeads> total;
    TESSERA_UNROLL for (int h = 0; h < kHeads; ++h) {
      TESSERA_UNROLL for (int j = 0; j < kQ; ++j) total[h][j] = ByteSimd::Zero();
    }
    const std::byte* const* at = quads + first;
    if constexpr (kWidth == 8) {
      AddKeyArray<8, 1, 1, kHeads>(plane.array[0], at, queries, stride, total);
      ShiftSums<4, kHeads>(total);
      AddKeyArray<8, 0, 1, kHeads>(plane.array[0], at, queries, stride, total);
    } else if constexpr (kWidth == 6) {
      AddKeyArray<4, 0, 2, kHeads>(plane.array[0], at, queries, stride, total);
      ShiftSums<2, kHeads>(total);
      AddKeyArray<2, 0, 4, kHeads>(plane.array[1], at, queries, stride, total);
    } else {
      AddKeyArray<kWidth, 0, 8 / kWidth, kHeads>(plane.array[0], at, queries, stride, total);
    }
    TESSERA_UNROLL for (int h = 0; h < kHeads; ++h) {
      ByteSimd::Store(dots[h] + first * 4, ByteSimd::SumGroups(total[h]));
    }
  }
}

// ---- values ----

// output[h][vector of products] += factor[h] x sum over rows of weight x code.
template <int kBits, int kHeads>
TESSERA_SIMD void AddValueArray(const QuadArray& array, const std::byte* const* quads,
                                const std::uint8_t (*weights)[kTileRows], const float* factor,
                                float* output, std::size_t stride) {
  constexpr int kParts = kBits == 2 ? 4 : 2;
  constexpr int kChunk =
      ByteSimd::kMostValueProducts < kQuads ? ByteSimd::kMostValueProducts : kQuads;
  output += array.first * ByteSimd::kWords;
  for (int v = 0; v < array.vectors; ++v, output += kParts * ByteSimd::kWords) {
    typename ByteSimd::Ints total[kHeads][kParts];
    TESSERA_UNROLL for (int h = 0; h < kHeads; ++h) {
      TESSERA_UNROLL for (int s = 0; s < kParts; ++s) total[h][s] = ByteSimd::Zero();
    }
    for (int done = 0; done < kQuads; done += kChunk) {
      typename ByteSimd::Sums sums[kHeads][kParts];
      TESSERA_UNROLL for (int h = 0; h < kHeads; ++h) {
        TESSERA_UNROLL for (int s = 0; s < kParts; ++s) sums[h][s] = ByteSimd::Begin(total[h][s]);
      }
      TESSERA_UNROLL for (int k = done; k < done + kChunk; ++k) {
        const auto words = LoadWords(array, quads[k], v);
        typename ByteSimd::Bytes codes[kParts];
        codes[0] = FieldOf<kBits, 0>(words);
        codes[1] = FieldOf<kBits, 1>(words);
        if constexpr (kParts == 4) {
          codes[2] = FieldOf<kBits, 2>(words);
          codes[3] = FieldOf<kBits, 3>(words);
        }
        TESSERA_UNROLL for (int h = 0; h < kHeads; ++h) {
          const auto weight = ByteSimd::SplatWord(weights[h] + 4 * k);
          TESSERA_UNROLL for (int s = 0; s < kParts; ++s) {
            sums[h][s] = ByteSimd::AddProducts(sums[h][s], weight, codes[s]);
          }
        }
      }
      TESSERA_UNROLL for (int h = 0; h < kHeads; ++h) {
        TESSERA_UNROLL for (int s = 0; s < kParts; ++s) {
          total[h][s] = ByteSimd::Finish(total[h][s], sums[h][s]);
        }
      }
    }
    TESSERA_UNROLL for (int h = 0; h < kHeads; ++h) {
      const auto scale = Simd::Splat(factor[h]);
      float* to = output + static_cast<std::size_t>(h) * stride;
      TESSERA_UNROLL for (int s = 0; s < kParts; ++s) {
        float* at = to + s * ByteSimd::kWords;
        Simd::Store(at, Simd::MultiplyAdd(scale, ByteSimd::ToFloats(total[h][s]), Simd::Load(at)));
      }
    }
  }
}

template <int kHeads>
static void AddPlane(const QuadPlane& plane, const std::byte* const* quads,
                     const std::uint8_t (*weights)[kTileRows], const float* factor, float* output,
                     std::size_t stride) {
  if (plane.width == 2) {
    return AddValueArray<2, kHeads>(plane.array[0], quads, weights, factor, output, stride);
  }
  AddValueArray<4, kHeads>(plane.array[0], quads, weights, factor, output, stride);
  if (plane.width == 6) {
    AddValueArray<2, kHeads>(plane.array[1], quads, weights, factor, output, stride);
  }
}

}  // namespace
}  // namespace tessera::kernels
