// The layout of the `planes` format: rotated, centred rows as integer codes.
//
// z = R (x - mu) is cut into one or two *planes* of consecutive channels, the most energetic first.
// Each plane has its own width, 2, 4, 6 or 8 bits, and each row one bf16 scale per plane:
//
//   z_c is read as scale * (code_c - (2^width - 1) / 2)         the value is never 0
//
// The encoder rounds z to steps of max |z| / 2^(width - 1) and stores the least-squares scale for
// the codes that result:
//
//   code = clamp(floor(z / step) + 2^(width - 1), 0, 2^width - 1), y = code - (2^width - 1) / 2
//   scale = bf16(sum y z / sum y y); 0 and codes 2^(width - 1) if max |z| < kSmallestScaledPeak
//
// Four neighbouring rows form a *quad*, a record that is read as a whole; a tile is eight quads,
// then weights and positions. A quad consists of 32-bit words:
//
//   K, plane after plane   [word][row 0..3]
//   V, plane after plane   [word], byte j belongs to row j
//   scales                 bf16 [plane][row 0..3], K's planes, then V's
//   zeros                  up to a multiple of kQuadAlignment bytes
//
//   width  a word of K (one row)                                      a word of V
//     2    bits 2s of byte j: channel 16 w + 4 s + j                  bits 2s: channel 4 w + s
//     4    low nibble of byte j: channel 8 w + j, high: 8 w + 4 + j   low: 2 w, high: 2 w + 1
//     6    words of the codes' upper 4 bits, then words of their lower 2 bits
//     8    byte j: channel 4 w + j                                    channel w
#pragma once

#include <cstdint>

namespace tessera::kernels {

inline constexpr std::uint32_t kQuadRows = 4;
inline constexpr std::uint32_t kTileQuads = 8;
inline constexpr std::uint32_t kMaxPlanes = 2;
inline constexpr std::uint32_t kQuadAlignment = 32;  // bytes

constexpr bool IsPlaneWidth(std::uint32_t width) {
  return width == 2 || width == 4 || width == 6 || width == 8;
}

// The bits per channel of one side's planes. 0: the side has no such plane.
struct PlaneWidths {
  std::uint8_t first = 0;
  std::uint8_t second = 0;

  constexpr std::uint32_t planes() const { return first == 0 ? 0 : second == 0 ? 1 : 2; }
  constexpr std::uint32_t width(std::uint32_t plane) const { return plane == 0 ? first : second; }
  bool operator==(const PlaneWidths&) const = default;
};

// Null if the widths are valid, otherwise the reason.
constexpr const char* UnsupportedReason(const PlaneWidths& widths) {
  if (!IsPlaneWidth(widths.first) || (widths.second != 0 && !IsPlaneWidth(widths.second))) {
    return "a plane's width is not 2, 4, 6 or 8 bits";
  }
  return nullptr;
}

// Byte offsets within a quad. Data only, so that files compiled with ISA flags may include it.
struct QuadLayout {
  std::uint16_t key[kMaxPlanes];    // the words of each plane
  std::uint16_t value[kMaxPlanes];  // likewise
  std::uint16_t key_scales;         // [plane][4 rows]
  std::uint16_t value_scales;
  std::uint16_t bytes;  // size of a quad; 0: the tile has another format
  std::uint16_t reserved;
};

// The bytes of one plane's words in a quad.
constexpr std::uint32_t PlaneBytes(std::uint32_t channels, std::uint32_t width) {
  return channels * width * kQuadRows / 8;
}

constexpr QuadLayout QuadLayoutOf(std::uint32_t head_dim, const PlaneWidths& key,
                                  const PlaneWidths& value) {
  QuadLayout layout = {};
  std::uint32_t at = 0;
  const auto place = [&at](std::uint32_t bytes) {
    const std::uint32_t begin = at;
    at += bytes;
    return static_cast<std::uint16_t>(begin);
  };
  for (std::uint32_t p = 0; p < key.planes(); ++p) {
    layout.key[p] = place(PlaneBytes(head_dim / key.planes(), key.width(p)));
  }
  for (std::uint32_t p = 0; p < value.planes(); ++p) {
    layout.value[p] = place(PlaneBytes(head_dim / value.planes(), value.width(p)));
  }
  layout.key_scales = place(key.planes() * kQuadRows * 2);
  layout.value_scales = place(value.planes() * kQuadRows * 2);
  layout.bytes =
      static_cast<std::uint16_t>((at + kQuadAlignment - 1) / kQuadAlignment * kQuadAlignment);
  return layout;
}

static_assert(QuadLayoutOf(128, {6, 4}, {4}).bytes == 608);     // 152 bytes per token
static_assert(QuadLayoutOf(128, {4, 2}, {4, 2}).bytes == 416);  // 104 bytes per token

// The widths if the lower two bits of every 6-bit code are dropped: what remains is a valid code of
// 4 bits whose scale is four times larger.
constexpr PlaneWidths WithoutCrumbs(const PlaneWidths& widths) {
  const auto drop = [](std::uint8_t width) { return width == 6 ? std::uint8_t{4} : width; };
  return {drop(widths.first), drop(widths.second)};
}

// ---- signs: an index of all keys for selection ----
//
// Per key one bit for each channel of z's first plane, 1 where z >= 0, and one byte for the norm,
// the mean |z| of all planes:
//
//   bits   [32 rows][head_dim / 16 bytes], channel c is bit c % 8 of byte c / 8
//   norms  u8 [32 rows]; k stands for 2^(k / 8 - 16), 0 for a row without norm

constexpr std::uint32_t SignBytes(std::uint32_t head_dim) { return head_dim / 16; }

}  // namespace tessera::kernels
