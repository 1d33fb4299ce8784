// How the words of a quad (kernels/format/planes.h) become tensor-core operands: by shifts and
// masks alone. A slice is a tile or eight gathered quads; its 32 rows are two groups of 16, four
// quads each.
//
//   K   u8 A operand of m16n8k32, rows x channels. Row g of a group is quad g / 2, slot 2 (g % 2);
//       row g + 8 is the slot behind it. So a lane's two rows are neighbouring words.
//   V   bf16 A operand of m16n8k16, channels x rows: one 4-bit word is one whole operand. Row g is
//       the word's first channel and row g + 8 its second; "k" 2t and 2t + 1 are slots 0 and 2 of
//       quad t, and 2t + 8 and 2t + 9 slots 1 and 3. Weights leave the softmax in this order.
//
// Each side's channels are two *halves* of head_dim / 2 channels: its planes, or the halves of its
// only plane. Within a half the order of channels in the sum over K is free. Lane t of four takes
// the channels of words i = t steps ... t steps + steps - 1: eight neighbouring channels a step.
// The codes of a query use the same order for every width.
//
//   width   K, step i                                 V, channels 2c and 2c + 1
//     4     word i                                    word c
//     2     word i / 2, shifted by 4 (i % 2)          word c / 2, shifted by 4 (c % 2)
//     6     the 4-bit words, times 4, then the 2-bit words
//     8     words 2i and 2i + 1                       words 2c and 2c + 1: upper 4 bits times 16,
//                                                     then lower 4 bits
#pragma once

#include <cstdint>

#include "kernels/cuda/common/target.h"
#include "kernels/format/tile_shape.h"

namespace tessera::kernels::cuda {

inline constexpr std::uint32_t kHalves = 2;
inline constexpr std::uint32_t kGroupRows = 16;
inline constexpr std::uint32_t kGroupQuads = kGroupRows / kQuadRows;

// Where a half is in a quad: byte offsets.
struct HalfPlane {
  std::uint32_t width = 0;
  std::uint32_t words = 0;   // of 4 bits (widths 4, 6) or 8 bits
  std::uint32_t crumbs = 0;  // of 2 bits (widths 2, 6)
  std::uint32_t scales = 0;  // bf16 [4 slots]

  TESSERA_HOST_DEVICE constexpr bool has_nibbles() const { return (width & 4) != 0; }
  TESSERA_HOST_DEVICE constexpr bool has_crumbs() const { return (width & 2) != 0; }
  TESSERA_HOST_DEVICE constexpr bool has_bytes() const { return width == 8; }
};
static_assert((6 & 4) != 0 && (6 & 2) != 0 && (8 & 6) == 0);

// Half `half` of keys or values.
TESSERA_HOST_DEVICE constexpr HalfPlane HalfPlaneOf(const TileShape& shape, const QuadLayout& quad,
                                                    bool of_value, std::uint32_t half) {
  const PlaneWidths widths = of_value ? shape.value_planes : shape.key_planes;
  const std::uint32_t scales = of_value ? quad.value_scales : quad.key_scales;
  const std::uint32_t channels = shape.head_dim / kHalves;
  const bool two = widths.second != 0;
  const std::uint32_t plane = two ? half : 0;
  const std::uint32_t width = plane == 0 ? widths.first : widths.second;
  const std::uint32_t first = of_value ? quad.value[plane] : quad.key[plane];
  const std::uint32_t before = two ? 0 : half;  // halves of the same plane
  const std::uint32_t words = width == 8 ? 8 : width == 2 ? 0 : 4;
  HalfPlane found;
  found.width = width;
  found.words = first + before * PlaneBytes(channels, words);
  found.crumbs =
      first + PlaneBytes(two ? channels : 2 * channels, words) + before * PlaneBytes(channels, 2);
  found.scales = scales + plane * kQuadRows * 2;
  return found;
}

// Row of accumulator row i (0: row g, 1: row g + 8) of group `group`, in the slice.
TESSERA_HOST_DEVICE constexpr std::uint32_t QuadRowOf(std::uint32_t lane, std::uint32_t group,
                                                      std::uint32_t i) {
  return group * kGroupRows + lane / 4 * 2 + i;
}
// The quad of a lane's K rows within their group, and the slot of the first.
TESSERA_HOST_DEVICE constexpr std::uint32_t KeyQuadOf(std::uint32_t lane) { return lane / 8; }
TESSERA_HOST_DEVICE constexpr std::uint32_t KeySlotOf(std::uint32_t lane) {
  return lane / 4 % 2 * 2;
}
TESSERA_HOST_DEVICE constexpr std::uint32_t ValueQuadOf(std::uint32_t lane) { return lane % 4; }

// Steps of K per half.
TESSERA_HOST_DEVICE constexpr std::uint32_t KeySteps(std::uint32_t head_dim) {
  return head_dim / 64;
}
// Step `step` of a lane: channels 8 i ... 8 i + 7 of the half.
TESSERA_HOST_DEVICE constexpr std::uint32_t KeyStepOf(std::uint32_t head_dim, std::uint32_t lane,
                                                      std::uint32_t step) {
  return lane % 4 * KeySteps(head_dim) + step;
}
// First of the four channels of register r of the query operand of step i; of the half.
TESSERA_HOST_DEVICE constexpr std::uint32_t KeyChannelOf(std::uint32_t i, std::uint32_t r) {
  return 8 * i + 4 * r;
}

// Steps of V per half, and the lane's channel pair c of a step. Lanes take runs of up to four
// neighbouring words, which are one load.
TESSERA_HOST_DEVICE constexpr std::uint32_t ValueSteps(std::uint32_t head_dim) {
  return head_dim / 32;
}
TESSERA_HOST_DEVICE constexpr std::uint32_t ValueRun(std::uint32_t head_dim) {
  return ValueSteps(head_dim) < 4 ? ValueSteps(head_dim) : 4;
}
TESSERA_HOST_DEVICE constexpr std::uint32_t ChannelPairOf(std::uint32_t head_dim,
                                                          std::uint32_t lane, std::uint32_t step) {
  const std::uint32_t run = ValueRun(head_dim);
  return step / run * 8 * run + lane / 4 * run + step % run;
}

// The A operands of K from the words of a lane's two rows.
struct QuadOperand {
  std::uint32_t a[4];
};
inline constexpr std::uint32_t kNibbles = 0x0f0f0f0fu;
inline constexpr std::uint32_t kCrumbs = 0x03030303u;
TESSERA_HOST_DEVICE constexpr QuadOperand KeyNibbles(std::uint32_t low, std::uint32_t high) {
  return {{low & kNibbles, high & kNibbles, low >> 4 & kNibbles, high >> 4 & kNibbles}};
}
// `shift`: 4 (i % 2).
TESSERA_HOST_DEVICE constexpr QuadOperand KeyCrumbs(std::uint32_t low, std::uint32_t high,
                                                    std::uint32_t shift) {
  return {{low >> shift & kCrumbs, high >> shift & kCrumbs, low >> (shift + 2) & kCrumbs,
           high >> (shift + 2) & kCrumbs}};
}

// Codes of V are expanded by setting the exponent of 128: the operand is 128 + code, exact in bf16.
inline constexpr std::uint32_t kExponents = 0x43004300u;
inline constexpr float kExponentValue = 128;
inline constexpr std::uint32_t kNibblePair = 0x000f000fu;
inline constexpr std::uint32_t kCrumbPair = 0x00030003u;

// The factor of the weights for the upper bits of a code: those of 4-bit words (widths 4, 6), or of
// the upper 4 bits of a byte.
TESSERA_HOST_DEVICE constexpr float UpperFactor(std::uint32_t width) {
  return width == 8 ? 16.0f : width == 6 ? 4.0f : 1.0f;
}
// What the operands of a channel sum to if its value is 0: 128 for each, and the code's centre.
TESSERA_HOST_DEVICE constexpr float ValueCentre(std::uint32_t width) {
  const float operands = width == 2 || width == 4 ? 1.0f : UpperFactor(width) + 1.0f;
  return operands * kExponentValue + (static_cast<float>(1u << width) - 1.0f) / 2.0f;
}
TESSERA_HOST_DEVICE constexpr float KeyCentre(std::uint32_t width) {
  return (static_cast<float>(1u << width) - 1.0f) / 2.0f;
}

// What rotate.cuh stores behind the head_dim int8 codes of a query row over planes or signs. The
// row has room for head_dim 16-bit elements.
struct CodedQuery {
  float scale[kHalves];  // a code's value; NaN if an element is not finite
  float sum[kHalves];    // of the half's codes
  float mean_product;    // q . mu_k
  float inverse_length;  // of the first half's codes; 1 if they are zeros
};
static_assert(64 + sizeof(CodedQuery) <= 64 * 2);

}  // namespace tessera::kernels::cuda
