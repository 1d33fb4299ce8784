// Locates the values of packed rows lane by lane. With it a warp loads a slice of 16 packed entries
// into mma.m16n8k16 operands without unpacking it in memory.
//
// The channels of a row are cut into eight slices of head_dim / 8 neighbouring channels. A lane
// walks the channel pairs of its slices upwards, one 32-bit word of two channels at a time. A word
// comes from the stored values if the bitmap has the pair, and is zero otherwise. A bit count
// locates a slice's first value; from there the walk only steps forward.
//
//   K   A operand, entries x channels    lane: entries l / 4 and + 8, slices 2 (l % 4) and + 1
//   V   A operand, channels x entries    lane: slice l / 4, entries 2 (l % 4), + 1, + 8, + 9
//
// In step s every lane takes pair s of its slices. So channel "k" of a step is not channel k of the
// row. The query operand uses the same permutation (PairChannel), so the sum over channels is
// unaffected. The same formula names the rows of the output operand. A word of V holds two channels
// of one entry; the words of two entries are exchanged into two words of one channel each
// (LowHalves, HighHalves).
//
//   group 2   one bit per word             group 4   one bit per two consecutive words
//   group 1   one bit per half word
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/common/target.h"
#include "kernels/format/value_type.h"

namespace tessera::kernels::cuda {

inline constexpr std::uint32_t kRowSlices = 8;

// The tensor-core operand type for rows of these values.
TESSERA_HOST_DEVICE constexpr ElementType OperandType(ValueType values) {
  return values == ValueType::kFp16 ? ElementType::kFp16 : ElementType::kBf16;
}

// The slice that register pair i (0: k 0-7, 1: k 8-15) of a K operand covers, and of the matching
// query operand.
TESSERA_HOST_DEVICE constexpr std::uint32_t KeySlice(std::uint32_t lane, std::uint32_t i) {
  return lane % 4 * 2 + i;
}
TESSERA_HOST_DEVICE constexpr std::uint32_t ValueSlice(std::uint32_t lane) { return lane / 4; }
// Entry i (0..3) of the four entries whose V a lane loads. Pairs (0, 1) and (2, 3) share registers.
TESSERA_HOST_DEVICE constexpr std::uint32_t ValueEntry(std::uint32_t lane, std::uint32_t i) {
  return lane % 4 * 2 + i % 2 + i / 2 * 8;
}

// The first channel of pair `pair` of a slice.
TESSERA_HOST_DEVICE constexpr std::uint32_t PairChannel(std::uint32_t head_dim, std::uint32_t slice,
                                                        std::uint32_t pair) {
  return slice * (head_dim / kRowSlices) + pair * 2;
}

TESSERA_HOST_DEVICE inline std::uint32_t CountBits(std::uint32_t word) {
#if defined(__CUDA_ARCH__)
  return static_cast<std::uint32_t>(__popc(word));
#else
  return static_cast<std::uint32_t>(std::popcount(word));
#endif
}

// Extracts `count` (0..32) bits of a bitmap, starting at bit `first`. Always reads the two words
// that contain bit `first` and bit `first` + 32.
TESSERA_HOST_DEVICE inline std::uint32_t BitsAt(const std::uint32_t* words, std::uint32_t first,
                                                std::uint32_t count) {
  const std::uint64_t both = words[first / 32] | static_cast<std::uint64_t>(words[first / 32 + 1])
                                                     << 32;
  const auto bits = static_cast<std::uint32_t>(both >> (first % 32));
  return count >= 32 ? bits : bits & ((1u << count) - 1);
}

// A slice of one row: its bits, one per group, and the number of groups that the row keeps before
// the slice.
struct RowSlice {
  std::uint32_t bits = 0;
  std::uint32_t before = 0;
};

// The groups of a slice in a row of `groups` groups: the first, and their number.
template <std::uint32_t kHeadDim, std::uint32_t kGroup>
struct SliceGroups {
  static constexpr std::uint32_t kPer = kHeadDim / kRowSlices / kGroup;  // groups of a whole slice
  static_assert(kPer >= 1 && kPer <= 32);
  std::uint32_t first;
  std::uint32_t count;

  TESSERA_HOST_DEVICE SliceGroups(std::uint32_t groups, std::uint32_t slice)
      : first(slice * kPer < groups ? slice * kPer : groups),
        count(groups - first < kPer ? groups - first : kPer) {}
};

// The slice of a row without a bitmap, which keeps every group.
template <std::uint32_t kHeadDim, std::uint32_t kGroup>
TESSERA_HOST_DEVICE inline RowSlice WholeSlice(std::uint32_t groups, std::uint32_t slice) {
  const SliceGroups<kHeadDim, kGroup> own(groups, slice);
  return {.bits = own.count >= 32 ? ~0u : (1u << own.count) - 1, .before = own.first};
}

// Counts how many groups a row keeps before each of its slices; byte s of the result is for slice
// s. `words` holds bitmaps of rows of `row_bits` bytes, one after another; the first is
// word-aligned. Bits from `groups` on belong to other rows. Reads from 4 bytes before the row's
// first byte to 4 + head_dim / 8 bytes after it.
template <std::uint32_t kHeadDim, std::uint32_t kGroup>
TESSERA_HOST_DEVICE inline std::uint64_t SliceStarts(const std::uint32_t* words, std::uint32_t row,
                                                     std::uint32_t row_bits, std::uint32_t groups) {
  constexpr std::uint32_t kPer = SliceGroups<kHeadDim, kGroup>::kPer;
  constexpr std::uint32_t kWords = (kRowSlices * kPer + 31) / 32;
  constexpr std::uint32_t kMask = kPer == 32 ? ~0u : (1u << kPer % 32) - 1;
  const std::uint32_t origin = row * row_bits * 8;
  std::uint32_t halves[2] = {0, 0};
  std::uint32_t before = 0;
  TESSERA_UNROLL
  for (std::uint32_t w = 0; w < kWords; ++w) {
    const std::uint32_t left = groups > w * 32 ? groups - w * 32 : 0;
    const std::uint32_t bits =
        left == 0 ? 0 : BitsAt(words, origin + w * 32, left < 32 ? left : 32);
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < 32 / kPer && w * 32 / kPer + i < kRowSlices; ++i) {
      const std::uint32_t slice = w * 32 / kPer + i;
      halves[slice / 4] |= before << (8 * (slice % 4));
      before += CountBits(bits >> (i * kPer) & kMask);
    }
  }
  return halves[0] | static_cast<std::uint64_t>(halves[1]) << 32;
}

// Extracts a slice of a row that keeps `before` groups before it. Bits of channels that the row
// lacks are 0.
template <std::uint32_t kHeadDim, std::uint32_t kGroup>
TESSERA_HOST_DEVICE inline RowSlice FindSlice(const std::uint32_t* words, std::uint32_t row,
                                              std::uint32_t row_bits, std::uint32_t groups,
                                              std::uint32_t slice, std::uint32_t before) {
  const SliceGroups<kHeadDim, kGroup> own(groups, slice);
  return {.bits = BitsAt(words, row * row_bits * 8 + own.first, own.count), .before = before};
}

// Walks the channel pairs of a slice. A stored value has kBytes bytes.
template <std::uint32_t kGroup, std::uint32_t kBytes>
class PairWalk {
 public:
  PairWalk() = default;
  // `values` is the row's first value. Rows that no query may see are walked with no bits set.
  TESSERA_HOST_DEVICE PairWalk(const RowSlice& slice, const std::byte* values)
      : bits_(slice.bits), at_(values + slice.before * kGroup * kBytes) {}

  // Returns the stored values of pair `pair`, the first channel in the low half; 0 for dropped
  // channels. Must be called with 0, 1, 2, ... in order.
  TESSERA_HOST_DEVICE std::uint32_t Next(std::uint32_t pair) {
    std::uint32_t word = 0;
    if constexpr (kGroup == 1) {
      TESSERA_UNROLL
      for (std::uint32_t half = 0; half < 2; ++half) {
        if ((bits_ >> (pair * 2 + half) & 1) == 0) continue;
        word |= Load<kBytes>() << (half * kBytes * 8);
        at_ += kBytes;
      }
    } else if ((bits_ >> (pair * 2 / kGroup) & 1) != 0) {
      word = Load<2 * kBytes>();
      at_ += 2 * kBytes;
    }
    return word;
  }

 private:
  template <std::uint32_t kCount>
  TESSERA_HOST_DEVICE std::uint32_t Load() const {
    if constexpr (kCount == 4) return *reinterpret_cast<const std::uint32_t*>(at_);
    if constexpr (kCount == 2) return *reinterpret_cast<const std::uint16_t*>(at_);
    return static_cast<std::uint32_t>(*at_);
  }

  std::uint32_t bits_ = 0;
  const std::byte* at_ = nullptr;
};

// Packs the upper halves of two floats that are exact in bf16.
TESSERA_HOST_DEVICE inline std::uint32_t PackExact(float low, float high) {
  return std::bit_cast<std::uint32_t>(low) >> 16 |
         (std::bit_cast<std::uint32_t>(high) & 0xffff0000u);
}

TESSERA_HOST_DEVICE inline float Int8Value(std::uint32_t stored) {
  // (2^23 + (value + 128)) - (2^23 + 128)
  return std::bit_cast<float>(0x4b000000u | ((stored & 0xffu) ^ 0x80u)) - 8388736.0f;
}

TESSERA_HOST_DEVICE inline float Fp8Value(std::uint32_t stored) {
  const std::uint32_t magnitude = stored & 0x7fu;
  // Read as fp32, the bits are 2^-120 times the value, also for subnormal values.
  const float value = std::bit_cast<float>(magnitude << 20) * 0x1p120f;
  const std::uint32_t bits = magnitude == 0x7f ? 0x7fc00000u : std::bit_cast<std::uint32_t>(value);
  return std::bit_cast<float>((stored & 0x80u) << 24 | bits);
}

// Converts two stored values to an operand register of OperandType, without their scale. Exact.
template <ValueType kValues>
TESSERA_HOST_DEVICE inline std::uint32_t ToOperand(std::uint32_t stored) {
  if constexpr (kValues == ValueType::kInt8) {
    return PackExact(Int8Value(stored), Int8Value(stored >> 8));
  } else if constexpr (kValues == ValueType::kFp8) {
    return PackExact(Fp8Value(stored), Fp8Value(stored >> 8));
  } else {
    return stored;
  }
}

// Exchanges (channel c, channel c + 1) of two entries: LowHalves returns channel c of both,
// HighHalves channel c + 1 of both.
TESSERA_HOST_DEVICE constexpr std::uint32_t LowHalves(std::uint32_t first, std::uint32_t second) {
  return (first & 0xffffu) | second << 16;
}
TESSERA_HOST_DEVICE constexpr std::uint32_t HighHalves(std::uint32_t first, std::uint32_t second) {
  return first >> 16 | (second & 0xffff0000u);
}

}  // namespace tessera::kernels::cuda
