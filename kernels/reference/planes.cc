#include "kernels/reference/planes.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/reference/scalar.h"
#include "kernels/reference/tile_row.h"

namespace tessera::kernels {
namespace {

SidePlanes SideOf(const TileShape& shape, const TileLayout& layout, bool values) {
  const PlaneWidths& widths = values ? shape.value_planes : shape.key_planes;
  const std::uint16_t(&words)[kMaxPlanes] = values ? layout.quad.value : layout.quad.key;
  SidePlanes side = {.values = values,
                     .quad = layout.quad.bytes,
                     .planes = widths.planes(),
                     .channels = shape.head_dim / widths.planes(),
                     .width = {},
                     .words = {},
                     .scales = values ? layout.quad.value_scales : layout.quad.key_scales};
  for (std::uint32_t p = 0; p < side.planes; ++p) {
    side.width[p] = widths.width(p);
    side.words[p] = words[p];
  }
  return side;
}

// A field of `bits` bits within a quad: one byte and a shift.
struct Field {
  std::uint32_t byte;
  std::uint32_t shift;
};

// The place of a channel in words of 2, 4 or 8 bits.
Field FieldOf(bool values, std::uint32_t bits, std::uint32_t row, std::uint32_t channel) {
  if (values) {
    const std::uint32_t per_word = 8 / bits;
    return {.byte = channel / per_word * 4 + row, .shift = channel % per_word * bits};
  }
  const std::uint32_t per_word = 32 / bits;
  const std::uint32_t within = channel % per_word;
  return {.byte = (channel / per_word * kQuadRows + row) * 4 + within % 4,
          .shift = within / 4 * bits};
}

std::uint32_t ReadField(const std::byte* words, const Field& field, std::uint32_t bits) {
  return std::to_integer<std::uint32_t>(words[field.byte]) >> field.shift & ((1u << bits) - 1);
}

void WriteField(std::byte* words, const Field& field, std::uint32_t value) {
  words[field.byte] |= std::byte{static_cast<std::uint8_t>(value << field.shift)};
}

// The codes' lower two bits follow their upper four.
std::uint32_t CrumbsAfter(std::uint32_t channels) { return PlaneBytes(channels, 4); }

double Centre(std::uint32_t width) { return ((1u << width) - 1) / 2.0; }

std::uint32_t WordsOf(const SidePlanes& side, std::uint32_t row, std::uint32_t plane) {
  return row / kQuadRows * side.quad + side.words[plane];
}

}  // namespace

SidePlanes KeyPlanes(const TileShape& shape, const TileLayout& layout) {
  return SideOf(shape, layout, false);
}
SidePlanes ValuePlanes(const TileShape& shape, const TileLayout& layout) {
  return SideOf(shape, layout, true);
}

std::uint32_t ReadCode(const SidePlanes& side, const std::byte* tile, std::uint32_t row,
                       std::uint32_t plane, std::uint32_t channel) {
  const std::byte* words = tile + WordsOf(side, row, plane);
  const std::uint32_t width = side.width[plane];
  const std::uint32_t slot = row % kQuadRows;
  if (width != 6) return ReadField(words, FieldOf(side.values, width, slot, channel), width);
  return ReadField(words, FieldOf(side.values, 4, slot, channel), 4) << 2 |
         ReadField(words + CrumbsAfter(side.channels), FieldOf(side.values, 2, slot, channel), 2);
}

void WriteCode(const SidePlanes& side, std::byte* tile, std::uint32_t row, std::uint32_t plane,
               std::uint32_t channel, std::uint32_t code) {
  std::byte* words = tile + WordsOf(side, row, plane);
  const std::uint32_t width = side.width[plane];
  const std::uint32_t slot = row % kQuadRows;
  if (width != 6) return WriteField(words, FieldOf(side.values, width, slot, channel), code);
  WriteField(words, FieldOf(side.values, 4, slot, channel), code >> 2);
  WriteField(words + CrumbsAfter(side.channels), FieldOf(side.values, 2, slot, channel), code & 3);
}

float ReadScale(const SidePlanes& side, const std::byte* tile, std::uint32_t row,
                std::uint32_t plane) {
  const std::byte* scales = tile + row / kQuadRows * side.quad + side.scales;
  return static_cast<float>(
      ElementAt(scales, plane * kQuadRows + row % kQuadRows, ElementType::kBf16));
}

void WriteScale(const SidePlanes& side, std::byte* tile, std::uint32_t row, std::uint32_t plane,
                float scale) {
  const std::uint16_t bits = FloatToBf16(scale);
  std::memcpy(tile + row / kQuadRows * side.quad + side.scales +
                  (plane * kQuadRows + row % kQuadRows) * sizeof(bits),
              &bits, sizeof(bits));
}

void ReadPlanesRow(const SidePlanes& side, const std::byte* tile, std::uint32_t row,
                   double* elements) {
  for (std::uint32_t p = 0; p < side.planes; ++p) {
    const double scale = ReadScale(side, tile, row, p);
    for (std::uint32_t c = 0; c < side.channels; ++c) {
      *elements++ = scale * (ReadCode(side, tile, row, p, c) - Centre(side.width[p]));
    }
  }
}

bool WritePlanesRow(const SidePlanes& side, const float* z, float error_limit, std::byte* tile,
                    std::uint32_t row) {
  double error = 0;
  double energy = 0;
  for (std::uint32_t p = 0; p < side.planes; ++p, z += side.channels) {
    const std::uint32_t width = side.width[p];
    double top = 0;
    for (std::uint32_t c = 0; c < side.channels; ++c) {
      if (!std::isfinite(z[c])) return false;
      top = std::max(top, std::fabs(double{z[c]}));
    }
    const double half = 1u << (width - 1);
    const bool empty = top < double{kSmallestScaledPeak};
    const double step = empty ? 1 : top / half;
    double codes[kMaxChannels];
    double yz = 0;
    double yy = 0;
    for (std::uint32_t c = 0; c < side.channels; ++c) {
      codes[c] = empty ? half : std::clamp(std::floor(z[c] / step) + half, 0.0, 2 * half - 1);
      const double y = codes[c] - Centre(width);
      yz += y * z[c];
      yy += y * y;
    }
    const float scale =
        Bf16ToFloat(FloatToBf16(empty ? 0 : static_cast<float>(std::max(yz / yy, 0.0))));
    if (!std::isfinite(scale)) return false;
    WriteScale(side, tile, row, p, scale);
    for (std::uint32_t c = 0; c < side.channels; ++c) {
      WriteCode(side, tile, row, p, c, static_cast<std::uint32_t>(codes[c]));
      const double off = z[c] - scale * (codes[c] - Centre(width));
      error += off * off;
      energy += double{z[c]} * z[c];
    }
  }
  return !(error > error_limit && error > double{kRefusedShare} * energy);
}

void CopyPlanesRow(const SidePlanes& from, const std::byte* source, std::uint32_t source_row,
                   const SidePlanes& to, std::byte* tile, std::uint32_t row) {
  for (std::uint32_t p = 0; p < to.planes; ++p) {
    const std::uint32_t dropped = from.width[p] - to.width[p];
    WriteScale(to, tile, row, p,
               ReadScale(from, source, source_row, p) * static_cast<float>(1u << dropped));
    for (std::uint32_t c = 0; c < to.channels; ++c) {
      WriteCode(to, tile, row, p, c, ReadCode(from, source, source_row, p, c) >> dropped);
    }
  }
}

void RoundQueryToCodes(const float* query, std::uint32_t planes, std::uint32_t channels,
                       double* rounded) {
  for (std::uint32_t p = 0; p < planes; ++p, query += channels, rounded += channels) {
    float top = 0;
    for (std::uint32_t c = 0; c < channels; ++c) {
      const float magnitude = std::fabs(query[c]);
      if (!(magnitude <= top)) top = magnitude;  // keeps NaN
      if (std::isnan(top)) break;
    }
    const float scale = top != 0 ? top / 127 : 1;
    for (std::uint32_t c = 0; c < channels; ++c) {
      // Not finite: the product is NaN, and so are the logits.
      rounded[c] = std::isfinite(top) ? double{scale} * std::nearbyint(query[c] / scale)
                                      : std::numeric_limits<double>::quiet_NaN();
    }
  }
}

// ---- signs ----

namespace {

std::byte* SignsOf(const TileShape& shape, const TileLayout& layout, std::byte* summaries,
                   std::uint32_t row) {
  return summaries + layout.block_bits + row * SignBytes(shape.head_dim);
}

}  // namespace

void WriteSigns(const TileShape& shape, const TileLayout& layout, const float* z,
                std::byte* summaries, std::uint32_t row) {
  std::byte* bits = SignsOf(shape, layout, summaries, row);
  double sum = 0;
  for (std::uint32_t c = 0; c < shape.head_dim; ++c) sum += std::fabs(z[c]);
  for (std::uint32_t c = 0; c < shape.head_dim / 2; ++c) {
    if (z[c] >= 0) bits[c / 8] |= std::byte{static_cast<std::uint8_t>(1u << c % 8)};
  }
  const double mean = sum / shape.head_dim;
  const double norm =
      mean > 0 ? std::clamp(std::nearbyint((std::log2(mean) + 16) * 8), 1.0, 255.0) : 0;
  summaries[layout.block_data + row] = std::byte{static_cast<std::uint8_t>(norm)};
}

void CopySigns(const TileShape& shape, const TileLayout& from, const std::byte* source,
               std::uint32_t source_row, const TileLayout& to, std::byte* summaries,
               std::uint32_t row) {
  const std::uint32_t bytes = SignBytes(shape.head_dim);
  std::memcpy(SignsOf(shape, to, summaries, row), source + from.block_bits + source_row * bytes,
              bytes);
  summaries[to.block_data + row] = source[from.block_data + source_row];
}

double SignScore(const ScorePart& part, const float* query, const std::byte* summaries,
                 std::uint32_t block, std::uint32_t entries) {
  const std::uint32_t channels = part.shape.head_dim / 2;
  double codes[kMaxChannels];
  float top = 0;
  for (std::uint32_t c = 0; c < channels; ++c) top = std::max(top, std::fabs(query[c]));
  const float scale = top != 0 ? top / 127 : 1;
  double squares = 0;
  for (std::uint32_t c = 0; c < channels; ++c) {
    codes[c] = std::nearbyint(query[c] / scale);
    squares += codes[c] * codes[c];
  }
  double best = -std::numeric_limits<double>::infinity();
  for (std::uint32_t e = 0; e < entries; ++e) {
    const std::uint32_t row = block * kQuadRows + e;
    const std::byte* bits = summaries + part.layout.block_bits + row * SignBytes(2 * channels);
    double dot = 0;
    for (std::uint32_t c = 0; c < channels; ++c) {
      const bool set = (std::to_integer<unsigned>(bits[c / 8]) >> c % 8 & 1u) != 0;
      dot += set ? codes[c] : -codes[c];
    }
    const auto k = std::to_integer<std::uint32_t>(summaries[part.layout.block_data + row]);
    const double norm = k == 0 ? 0 : std::exp2(k / 8.0 - 16);
    best = std::max(best, norm * dot / (squares > 0 ? std::sqrt(squares) : 1));
  }
  return best;
}

}  // namespace tessera::kernels
