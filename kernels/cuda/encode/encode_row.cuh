// Encodes one row of a tile with one warp: selects the strongest groups and packs them. Also reads
// stored rows back. The arithmetic matches kernels/reference/encode.cc bit for bit.
//
// Lane l holds groups l, l + 32, l + 64, ... A ballot over one of these is a word of the bitmap,
// and the number of set bits below the lane is the rank of its values.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/common/gpu.cuh"
#include "kernels/cuda/encode/encode_index.h"
#include "kernels/format/value_type.h"

namespace tessera::kernels::cuda {

// Explicit, because the compiler may or may not contract a * b + c.
TESSERA_DEVICE float FusedMultiplyAdd(float a, float b, float c) {
#if defined(__CUDACC__)
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

TESSERA_DEVICE float Magnitude(float x) {
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(x) & 0x7fffffffu);
}

TESSERA_DEVICE float MaxOverWarp(float value) {
  TESSERA_UNROLL
  for (std::uint32_t mask = 1; mask < kWarp; mask *= 2) {
    value = gpu::Max(value, gpu::ShuffleXor(value, mask));
  }
  return value;
}

// Location of one stored row.
struct RowPlace {
  std::byte* bits;  // null: every channel is stored
  std::byte* scale;
  std::byte* data;
};

TESSERA_DEVICE RowPlace PlaceOf(std::byte* tile, const RowArrays& arrays, std::uint32_t row) {
  return {.bits = arrays.row.bits != 0 ? tile + arrays.bits + row * arrays.row.bits : nullptr,
          .scale = tile + arrays.scales + row * arrays.row.scale,
          .data = tile + arrays.data + row * arrays.row.data};
}

// ---- Selecting ---------------------------------------------------------------------------------

// Keys are the bits of non-negative floats, which order like the floats; -1 if a lane has no group.
template <std::uint32_t kWords>
TESSERA_DEVICE std::uint32_t CountAtLeast(const std::int32_t (&keys)[kWords],
                                          std::int32_t threshold) {
  std::uint32_t count = 0;
  TESSERA_UNROLL
  for (std::uint32_t w = 0; w < kWords; ++w) {
    count += gpu::PopCount(gpu::Ballot(keys[w] >= threshold));
  }
  return count;
}

// Returns a threshold that at least `need` keys reach and fewer than `need` exceed. Searches bit by
// bit from the top and stops once exactly `need` keys reach it, which is early if there are no
// ties.
template <std::uint32_t kWords>
TESSERA_DEVICE std::int32_t ThresholdOf(const std::int32_t (&keys)[kWords], std::uint32_t need) {
  std::int32_t threshold = 0;
  for (std::int32_t bit = 30; bit >= 0; --bit) {
    const std::int32_t higher = threshold | (1 << bit);
    const std::uint32_t count = CountAtLeast<kWords>(keys, higher);
    if (count < need) continue;
    threshold = higher;
    if (count == need) break;
  }
  return threshold;
}

// Computes bitmap words with the `need` largest keys; of equal keys the lower group wins.
template <std::uint32_t kWords>
TESSERA_DEVICE void KeepStrongest(const std::int32_t (&keys)[kWords], std::uint32_t need,
                                  std::uint32_t (&kept)[kWords]) {
  const std::int32_t threshold = ThresholdOf<kWords>(keys, need);
  std::uint32_t above = 0;
  std::uint32_t equal[kWords];
  TESSERA_UNROLL
  for (std::uint32_t w = 0; w < kWords; ++w) {
    equal[w] = gpu::Ballot(keys[w] == threshold);
    kept[w] = gpu::Ballot(keys[w] > threshold);
    above += gpu::PopCount(kept[w]);
  }
  // If the search stopped early, the threshold lies between two keys or on the last one kept, and
  // every key equal to it is wanted.
  std::uint32_t wanted = need - above;
  TESSERA_UNROLL
  for (std::uint32_t w = 0; w < kWords; ++w) {
    const std::uint32_t ahead = gpu::PopCount(equal[w] & LanesBelow(gpu::Lane()));
    kept[w] |= gpu::Ballot((equal[w] >> gpu::Lane() & 1u) != 0 && ahead < wanted);
    const std::uint32_t count = gpu::PopCount(equal[w]);
    wanted -= count < wanted ? count : wanted;
  }
}

// ---- Packing -----------------------------------------------------------------------------------

// 2^-e, for a row whose largest magnitude is in [2^e, 2^(e + 1)). Keeps sums of squares in range.
TESSERA_DEVICE float NormaliserOf(float peak) {
  std::uint32_t exponent = std::bit_cast<std::uint32_t>(peak) >> 23;
  if (exponent < 1) exponent = 1;
  if (exponent > 253) exponent = 253;
  return std::bit_cast<float>((254 - exponent) << 23);
}

// The groups of a row that this lane holds.
template <std::uint32_t kWordsValue, std::uint32_t kGroup>
struct LaneGroups {
  static constexpr std::uint32_t kWords = kWordsValue;
  float values[kWords][kGroup];
  std::int32_t keys[kWords];

  TESSERA_DEVICE void Load(const float* row, std::uint32_t groups) {
    TESSERA_UNROLL
    for (std::uint32_t w = 0; w < kWords; ++w) {
      const std::uint32_t group = w * kWarp + gpu::Lane();
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < kGroup; ++i) {
        values[w][i] = group < groups ? row[group * kGroup + i] : 0;
      }
    }
  }

  // Over the groups in `kept`, or over all groups.
  TESSERA_DEVICE float Peak(const std::uint32_t (*kept)[kWords]) const {
    float peak = 0;
    TESSERA_UNROLL
    for (std::uint32_t w = 0; w < kWords; ++w) {
      if (kept != nullptr && ((*kept)[w] >> gpu::Lane() & 1u) == 0) continue;
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < kGroup; ++i) peak = gpu::Max(peak, Magnitude(values[w][i]));
    }
    return MaxOverWarp(peak);
  }

  TESSERA_DEVICE void Judge(std::uint32_t groups) {
    const float normaliser = kGroup == 1 ? 1 : NormaliserOf(Peak(nullptr));
    TESSERA_UNROLL
    for (std::uint32_t w = 0; w < kWords; ++w) {
      float key = Magnitude(values[w][0]);
      if constexpr (kGroup > 1) {
        key = 0;
        TESSERA_UNROLL
        for (std::uint32_t i = 0; i < kGroup; ++i) {
          const float scaled = values[w][i] * normaliser;
          key = FusedMultiplyAdd(scaled, scaled, key);
        }
      }
      keys[w] = w * kWarp + gpu::Lane() < groups ? std::bit_cast<std::int32_t>(key) : -1;
    }
  }
};

// Stores the word's four bytes, as far as the row's bitmap reaches; one byte each by four lanes.
TESSERA_DEVICE void StoreBits(std::byte* bits, std::uint32_t row_bits, std::uint32_t word_index,
                              std::uint32_t word) {
  const std::uint32_t at = word_index * 4 + gpu::Lane();
  if (gpu::Lane() < 4 && at < row_bits) {
    bits[at] = static_cast<std::byte>(word >> (8 * gpu::Lane()) & 0xffu);
  }
}

// Stores one value. Returns the element that the stored value represents.
TESSERA_DEVICE float StoreValue(ValueType type, std::byte* data, std::uint32_t index, float value,
                                float scale) {
  if (IsScaled(type)) {
    const std::uint8_t stored = ToScaled(type, value, scale);
    data[index] = std::byte{stored};
    return scale * FromScaled(type, stored);
  }
  const bool bf16 = type == ValueType::kBf16;
  const auto bits = static_cast<std::uint16_t>(bf16 ? gpu::PackPair<ElementType::kBf16>(value, 0)
                                                    : gpu::PackPair<ElementType::kFp16>(value, 0));
  reinterpret_cast<std::uint16_t*>(data)[index] = bits;
  return bf16 ? Bf16ToFloat(bits) : gpu::HalfToFloat(bits);
}

// Packs a row of fp32 elements. If `keep` is set, the row afterwards holds the elements as stored;
// dropped ones are 0.
template <std::uint32_t kHeadDim, std::uint32_t kGroup>
TESSERA_DEVICE void PackGroups(ValueType type, const RowShape& shape, float* row,
                               std::uint32_t row_bits, const RowPlace& place, bool keep) {
  using Groups = LaneGroups<(kHeadDim / kGroup + kWarp - 1) / kWarp, kGroup>;
  const std::uint32_t groups = shape.channels / kGroup;
  Groups lane;
  lane.Load(row, groups);
  lane.Judge(groups);
  std::uint32_t kept[Groups::kWords];
  KeepStrongest<Groups::kWords>(lane.keys, shape.kept / kGroup, kept);
  float scale = 0;
  if (IsScaled(type)) {
    const std::uint16_t bits = ScaleOf(type, lane.Peak(&kept));
    scale = Bf16ToFloat(bits);
    if (gpu::Lane() == 0) *reinterpret_cast<std::uint16_t*>(place.scale) = bits;
  }
  std::uint32_t before = 0;
  TESSERA_UNROLL
  for (std::uint32_t w = 0; w < Groups::kWords; ++w) {
    StoreBits(place.bits, row_bits, w, kept[w]);
    const std::uint32_t rank = before + gpu::PopCount(kept[w] & LanesBelow(gpu::Lane()));
    const bool live = (kept[w] >> gpu::Lane() & 1u) != 0;
    const std::uint32_t group = w * kWarp + gpu::Lane();
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < kGroup; ++i) {
      float stored = 0;
      if (live) {
        stored = StoreValue(type, place.data, rank * kGroup + i, lane.values[w][i], scale);
      }
      if (keep && group < groups) row[group * kGroup + i] = stored;
    }
    before += gpu::PopCount(kept[w]);
  }
}

template <std::uint32_t kHeadDim>
TESSERA_DEVICE void PackRow(const TileShape& tile, const RowShape& shape, float* row,
                            std::uint32_t row_bits, const RowPlace& place, bool keep) {
  const ValueType type = ValuesOf(tile.format);
  if (tile.group == 1) PackGroups<kHeadDim, 1>(type, shape, row, row_bits, place, keep);
  if (tile.group == 2) PackGroups<kHeadDim, 2>(type, shape, row, row_bits, place, keep);
  if (tile.group == 4) PackGroups<kHeadDim, 4>(type, shape, row, row_bits, place, keep);
}

// ---- Reading back ------------------------------------------------------------------------------

TESSERA_DEVICE float LoadElementOf(ElementType type, const std::byte* row, std::uint32_t index) {
  if (type == ElementType::kFp32) return reinterpret_cast<const float*>(row)[index];
  const std::uint16_t bits = reinterpret_cast<const std::uint16_t*>(row)[index];
  return type == ElementType::kBf16 ? Bf16ToFloat(bits) : gpu::HalfToFloat(bits);
}

TESSERA_DEVICE float LoadValueOf(ValueType type, const RowPlace& place, std::uint32_t index,
                                 float scale) {
  if (IsScaled(type))
    return scale * FromScaled(type, std::to_integer<std::uint8_t>(place.data[index]));
  return LoadElementOf(type == ValueType::kBf16 ? ElementType::kBf16 : ElementType::kFp16,
                       place.data, index);
}

// Reads a stored row as `width` fp32 elements, a multiple of 32; elements that the row does not
// keep are 0.
TESSERA_DEVICE void ReadStoredRow(const TileShape& tile, const RowShape& shape,
                                  const RowPlace& place, std::uint32_t width, float* elements) {
  if (!tile.packed()) {
    for (std::uint32_t c = gpu::Lane(); c < width; c += kWarp) {
      elements[c] = LoadElementOf(ElementsOf(tile.format), place.data, c);
    }
    return;
  }
  const ValueType type = ValuesOf(tile.format);
  const float scale =
      IsScaled(type) ? Bf16ToFloat(*reinterpret_cast<const std::uint16_t*>(place.scale)) : 0;
  std::uint32_t before = 0;
  for (std::uint32_t first = 0; first < width; first += kWarp) {
    const std::uint32_t channel = first + gpu::Lane();
    const std::uint32_t group = channel / tile.group;
    const bool live =
        channel < shape.channels &&
        (place.bits == nullptr ||
         (std::to_integer<std::uint32_t>(place.bits[group / 8]) >> (group % 8) & 1u) != 0);
    const std::uint32_t kept = gpu::Ballot(live);
    const std::uint32_t rank = before + gpu::PopCount(kept & LanesBelow(gpu::Lane()));
    // A bitmap with too many bits must not lead beyond the row.
    elements[channel] = live && rank < shape.kept ? LoadValueOf(type, place, rank, scale) : 0;
    before += gpu::PopCount(kept);
  }
}

}  // namespace tessera::kernels::cuda
