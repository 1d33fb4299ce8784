// Rows in planes: from rotated rows to the words of quads and back. A warp has a quad, and eight
// lanes one of its four rows; lane i of them takes channels 32 j + 4 i ... + 3.
//
// Codes pass through shared memory, one byte each, where the row's rotated elements were.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/common/planes_index.h"
#include "kernels/cuda/encode/encode_row.cuh"
#include "kernels/cuda/encode/tile_ops_params.h"
#include "kernels/format/part.h"

namespace tessera::kernels::cuda {

inline constexpr std::uint32_t kRowLanes = kWarp / kQuadRows;

// A quad's side, plane by plane.
struct QuadSide {
  HalfPlane first;
  HalfPlane second;
  std::uint32_t planes;
  std::uint32_t channels;  // per plane

  // Not an array: an index that is not known would put it on the stack.
  TESSERA_HOST_DEVICE constexpr HalfPlane plane(std::uint32_t p) const {
    return p == 0 ? first : second;
  }
};

TESSERA_HOST_DEVICE inline QuadSide QuadSideOf(const TileShape& shape, const TileLayout& layout,
                                               bool of_value) {
  const std::uint32_t planes = (of_value ? shape.value_planes : shape.key_planes).planes();
  return {.first = HalfPlaneOf(shape, layout.quad, of_value, 0),
          .second = HalfPlaneOf(shape, layout.quad, of_value, 1),
          .planes = planes,
          .channels = shape.head_dim / planes};
}

// Where the codes of row `row` of quad `quad` are.
template <class Shape>
TESSERA_DEVICE std::byte* CodesOfRow(float* rotated, std::uint32_t quad, std::uint32_t row) {
  return reinterpret_cast<std::byte*>(rotated + (quad * kQuadRows + row) * Shape::kRowFloats);
}

TESSERA_DEVICE std::uint32_t CodeWord(const std::byte* codes, std::uint32_t channel) {
  return *reinterpret_cast<const std::uint32_t*>(codes + channel);
}

// Sums over the lanes of a row.
TESSERA_DEVICE float SumOfRow(float value) {
  TESSERA_UNROLL
  for (std::uint32_t mask = 1; mask < kRowLanes; mask *= 2) value += gpu::ShuffleXor(value, mask);
  return value;
}
TESSERA_DEVICE float MaxOfRow(float value) {
  TESSERA_UNROLL
  for (std::uint32_t mask = 1; mask < kRowLanes; mask *= 2) {
    value = gpu::Max(value, gpu::ShuffleXor(value, mask));
  }
  return value;
}

// ---- Words -------------------------------------------------------------------------------------

// A word of K: channels from `channel` on, of one row.
TESSERA_HOST_DEVICE constexpr std::uint32_t PackKeyNibbles(std::uint32_t front,
                                                           std::uint32_t back) {
  return (front & kNibbles) | (back & kNibbles) << 4;
}

// Bits [shift, shift + bits) of byte 0 and up of each of four rows' codes, as a word of V:
// `rows[j]` holds the word's channels of row j, one per byte.
TESSERA_HOST_DEVICE constexpr std::uint32_t PackValueWord(const std::uint32_t (&rows)[kQuadRows],
                                                          std::uint32_t bits, std::uint32_t shift) {
  std::uint32_t word = 0;
  for (std::uint32_t j = 0; j < kQuadRows; ++j) {
    std::uint32_t fields = 0;
    for (std::uint32_t s = 0; s < 8 / bits; ++s) {
      fields |= (rows[j] >> (8 * s + shift) & ((1u << bits) - 1)) << (bits * s);
    }
    word |= fields << (8 * j);
  }
  return word;
}

// Words of `bits` bits of K: bits [shift, shift + bits) of the codes.
template <class Shape>
TESSERA_DEVICE void StoreKeyWords(std::uint32_t bits, std::uint32_t shift, std::uint32_t channels,
                                  std::uint32_t first, std::uint32_t quad, float* rotated,
                                  std::byte* words) {
  const std::uint32_t count = channels * bits / 32 * kQuadRows;
  for (std::uint32_t i = gpu::Lane(); i < count; i += kWarp) {
    const std::byte* codes = CodesOfRow<Shape>(rotated, quad, i % kQuadRows) + first;
    const std::uint32_t w = i / kQuadRows;
    std::uint32_t word = 0;
    if (bits == 8) {
      word = CodeWord(codes, 4 * w);
    } else if (bits == 4) {
      word = PackKeyNibbles(CodeWord(codes, 8 * w) >> shift, CodeWord(codes, 8 * w + 4) >> shift);
    } else {
      TESSERA_UNROLL
      for (std::uint32_t s = 0; s < 4; ++s) {
        word |= (CodeWord(codes, 16 * w + 4 * s) & kCrumbs) << (2 * s);
      }
    }
    reinterpret_cast<std::uint32_t*>(words)[i] = word;
  }
}

template <class Shape>
TESSERA_DEVICE void StoreValueWords(std::uint32_t bits, std::uint32_t shift, std::uint32_t channels,
                                    std::uint32_t first, std::uint32_t quad, float* rotated,
                                    std::byte* words) {
  const std::uint32_t per_word = 8 / bits;
  for (std::uint32_t w = gpu::Lane(); w < channels / per_word; w += kWarp) {
    std::uint32_t rows[kQuadRows];
    TESSERA_UNROLL
    for (std::uint32_t j = 0; j < kQuadRows; ++j) {
      const std::uint32_t channel = first + w * per_word;
      // The aligned word that contains the channels; those before them are shifted out.
      rows[j] =
          CodeWord(CodesOfRow<Shape>(rotated, quad, j), channel / 4 * 4) >> (8 * (channel % 4));
    }
    std::uint32_t word;
    if (bits == 8) {
      word = PackValueWord(rows, 8, 0);
    } else if (bits == 4) {
      word = PackValueWord(rows, 4, shift);
    } else {
      word = PackValueWord(rows, 2, 0);
    }
    reinterpret_cast<std::uint32_t*>(words)[w] = word;
  }
}

// Stores the words of one side of a quad from its codes, and with V the zeros behind the scales.
// Warp-collective.
template <class Shape>
TESSERA_DEVICE void StoreQuadWords(const DeviceStrategy& strategy, bool of_value,
                                   std::uint32_t quad, float* rotated, std::byte* to) {
  const QuadSide side = QuadSideOf(strategy.shape, strategy.layout, of_value);
  for (std::uint32_t p = 0; p < side.planes; ++p) {
    const HalfPlane plane = side.plane(p);
    const std::uint32_t first = p * side.channels;
    const auto store = [&](std::uint32_t bits, std::uint32_t shift, std::uint32_t at) {
      if (of_value) {
        StoreValueWords<Shape>(bits, shift, side.channels, first, quad, rotated, to + at);
      } else {
        StoreKeyWords<Shape>(bits, shift, side.channels, first, quad, rotated, to + at);
      }
    };
    if (plane.has_nibbles()) store(4, plane.has_crumbs() ? 2 : 0, plane.words);
    if (plane.has_crumbs()) store(2, 0, plane.crumbs);
    if (plane.has_bytes()) store(8, 0, plane.words);
  }
  if (!of_value) return;
  const QuadLayout& layout = strategy.layout.quad;
  const std::uint32_t end = layout.value_scales + side.planes * kQuadRows * 2;
  for (std::uint32_t i = end + gpu::Lane(); i < layout.bytes; i += kWarp) to[i] = std::byte{0};
}

TESSERA_DEVICE void StoreScale(const HalfPlane& plane, std::uint32_t row, std::uint16_t scale,
                               std::byte* quad) {
  reinterpret_cast<std::uint16_t*>(quad + plane.scales)[row] = scale;
}

// ---- Encoding ----------------------------------------------------------------------------------

struct RowError {
  float error = 0;
  float energy = 0;
};

// Codes one plane of the lane's row: `z` are its elements of groups [first, last) of 32 channels.
// Every lane of the row gets the same scale and error.
template <std::uint32_t kGroups>
TESSERA_DEVICE std::uint16_t CodePlane(std::uint32_t width, std::uint32_t first, std::uint32_t last,
                                       const float (&z)[kGroups][4],
                                       std::uint32_t (&codes)[kGroups], RowError& found) {
  float peak = 0;
  TESSERA_UNROLL
  for (std::uint32_t g = 0; g < kGroups; ++g) {
    if (g < first || g >= last) continue;
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < 4; ++i) peak = gpu::Max(peak, z[g][i] < 0 ? -z[g][i] : z[g][i]);
  }
  peak = MaxOfRow(peak);
  const bool empty = !(peak >= kSmallestScaledPeak);
  const auto half = static_cast<float>(1u << (width - 1));
  const float step = empty ? 0 : peak / half;
  const float inverse = empty ? 0 : half / peak;
  float yt = 0;
  float yy = 0;
  float tt = 0;
  TESSERA_UNROLL
  for (std::uint32_t g = 0; g < kGroups; ++g) {
    if (g < first || g >= last) continue;
    codes[g] = 0;
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < 4; ++i) {
      const float t = z[g][i] * inverse;
      float code = ::floorf(t) + half;
      code = code < 0 ? 0 : (code > 2 * half - 1 ? 2 * half - 1 : code);
      const float y = code - KeyCentre(width);
      yt += y * t;
      yy += y * y;
      tt += t * t;
      codes[g] |= static_cast<std::uint32_t>(code) << (8 * i);
    }
  }
  yt = SumOfRow(yt);
  yy = SumOfRow(yy);
  tt = SumOfRow(tt);
  const std::uint16_t scale = FloatToBf16(yt > 0 ? step * (yt / yy) : 0);
  const float used = empty ? 0 : Bf16ToFloat(scale) / step;
  found.error += step * step * (tt - used * (2 * yt - used * yy));
  found.energy += step * step * tt;
  return scale;
}

// Stores one side of the tile from its rotated rows, and zeros after the last one. Returns true if
// the error of the lane's row is over the limit. Needs no barrier but those of its warps.
template <class Shape>
TESSERA_DEVICE bool StoreQuads(const DeviceStrategy& strategy, bool of_value, std::uint32_t rows,
                               float* rotated, std::byte* tile) {
  constexpr std::uint32_t kGroups = Shape::kHeadDim / 32;
  const QuadSide side = QuadSideOf(strategy.shape, strategy.layout, of_value);
  const float limit = of_value ? strategy.value_error_limit : strategy.key_error_limit;
  const std::uint32_t row = gpu::Lane() / kRowLanes;
  const std::uint32_t channel = gpu::Lane() % kRowLanes * 4;
  bool refused = false;
  for (std::uint32_t q = gpu::Warp(); q < kTileQuads; q += Shape::kWarps) {
    std::byte* quad = tile + q * strategy.layout.quad.bytes;
    const bool live = q * kQuadRows + row < rows;
    const float* elements = rotated + (q * kQuadRows + row) * Shape::kRowFloats + channel;
    float z[kGroups][4];
    TESSERA_UNROLL
    for (std::uint32_t g = 0; g < kGroups; ++g) {
      const gpu::Chunk four = reinterpret_cast<const gpu::Chunk*>(elements)[g * 8];
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < 4; ++i)
        z[g][i] = live ? std::bit_cast<float>(four.words[i]) : 0;
    }
    std::uint32_t codes[kGroups] = {};
    RowError found;
    for (std::uint32_t p = 0; p < side.planes; ++p) {
      const std::uint32_t groups = side.channels / 32;
      const std::uint16_t scale =
          CodePlane(side.plane(p).width, p * groups, (p + 1) * groups, z, codes, found);
      if (channel == 0) StoreScale(side.plane(p), row, live ? scale : std::uint16_t{0}, quad);
    }
    refused |= found.error > limit && found.error > kRefusedShare * found.energy;
    gpu::SyncWarp();  // every lane has read the elements that the codes overwrite
    auto* to = reinterpret_cast<std::uint32_t*>(CodesOfRow<Shape>(rotated, q, row) + channel);
    TESSERA_UNROLL
    for (std::uint32_t g = 0; g < kGroups; ++g) to[g * 8] = live ? codes[g] : 0;
    gpu::SyncWarp();
    StoreQuadWords<Shape>(strategy, of_value, q, rotated, quad);
  }
  return refused;
}

// ---- Reading back ------------------------------------------------------------------------------

// A field of `bits` bits of one channel of a row. `words` are those of its plane in the quad.
TESSERA_HOST_DEVICE inline std::uint32_t FieldOf(const std::byte* words, bool of_value,
                                                 std::uint32_t bits, std::uint32_t row,
                                                 std::uint32_t channel) {
  const std::uint32_t per_word = of_value ? 8 / bits : 32 / bits;
  const std::uint32_t within = channel % per_word;
  const std::uint32_t byte = of_value ? channel / per_word * 4 + row
                                      : (channel / per_word * kQuadRows + row) * 4 + within % 4;
  const std::uint32_t shift = (of_value ? within : within / 4) * bits;
  return static_cast<std::uint32_t>(words[byte]) >> shift & ((1u << bits) - 1);
}

TESSERA_HOST_DEVICE inline std::uint32_t CodeOf(const HalfPlane& plane, const std::byte* quad,
                                                bool of_value, std::uint32_t row,
                                                std::uint32_t channel) {
  if (plane.has_bytes()) return FieldOf(quad + plane.words, of_value, 8, row, channel);
  const std::uint32_t upper =
      plane.has_nibbles() ? FieldOf(quad + plane.words, of_value, 4, row, channel) : 0;
  if (!plane.has_crumbs()) return upper;
  return upper << 2 | FieldOf(quad + plane.crumbs, of_value, 2, row, channel);
}

TESSERA_HOST_DEVICE inline float ScaleAt(const HalfPlane& plane, const std::byte* quad,
                                         std::uint32_t row) {
  return Bf16ToFloat(reinterpret_cast<const std::uint16_t*>(quad + plane.scales)[row]);
}

// Reads a stored row as fp32, with one warp.
TESSERA_DEVICE void ReadQuadRow(const DeviceStrategy& strategy, bool of_value,
                                const std::byte* tile, std::uint32_t row, float* elements) {
  const QuadSide side = QuadSideOf(strategy.shape, strategy.layout, of_value);
  const std::byte* quad = tile + row / kQuadRows * strategy.layout.quad.bytes;
  for (std::uint32_t i = gpu::Lane(); i < strategy.shape.head_dim; i += kWarp) {
    const HalfPlane plane = side.plane(i / side.channels);
    const std::uint32_t code = CodeOf(plane, quad, of_value, row % kQuadRows, i % side.channels);
    elements[i] =
        ScaleAt(plane, quad, row % kQuadRows) * (static_cast<float>(code) - KeyCentre(plane.width));
  }
}

// Fills the codes of quad `q` of a new tile from rows of others, and stores their scales. Codes
// that lose their crumbs have scales four times larger. Warp-collective.
template <class Shape>
TESSERA_DEVICE void CopyQuadCodes(const DeviceStrategy& from, const DeviceStrategy& to,
                                  bool of_value, const GatherRow* rows, std::uint32_t count,
                                  std::uint32_t q, float* scratch, std::byte* quad) {
  const QuadSide from_side = QuadSideOf(from.shape, from.layout, of_value);
  const QuadSide to_side = QuadSideOf(to.shape, to.layout, of_value);
  const std::uint32_t slot = gpu::Lane() / kRowLanes;
  const std::uint32_t index = q * kQuadRows + slot;
  const bool live = index < count;
  const std::uint32_t row = live ? rows[index].row % kQuadRows : 0;
  const std::byte* source =
      live ? rows[index].tile + rows[index].row / kQuadRows * from.layout.quad.bytes : nullptr;
  std::byte* codes = CodesOfRow<Shape>(scratch, q, slot);
  for (std::uint32_t c = gpu::Lane() % kRowLanes; c < Shape::kHeadDim; c += kRowLanes) {
    const std::uint32_t p = c / to_side.channels;
    const std::uint32_t dropped = from_side.plane(p).width - to_side.plane(p).width;
    const std::uint32_t code =
        live ? CodeOf(from_side.plane(p), source, of_value, row, c % to_side.channels) >> dropped
             : 0;
    codes[c] = static_cast<std::byte>(code);
  }
  if (const std::uint32_t p = gpu::Lane() % kRowLanes; p < to_side.planes) {
    const std::uint32_t dropped = from_side.plane(p).width - to_side.plane(p).width;
    const float scale =
        live ? ScaleAt(from_side.plane(p), source, row) * static_cast<float>(1u << dropped) : 0;
    StoreScale(to_side.plane(p), slot, FloatToBf16(scale), quad);
  }
}

}  // namespace tessera::kernels::cuda
