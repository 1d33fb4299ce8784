// Where the values of packed rows are, lane by lane: how a warp takes a slice of 16 packed entries
// into the operands of mma.m16n8k16 without unpacking it in memory.
//
// The channels of a row are cut into eight slices of head_dim / 8 neighbours, and a lane walks the
// channel pairs of its slices upwards: one 32-bit word of two channels after another, taken from
// the stored values where the bitmap has them, zero where not. The place of a slice's first value
// is one count of bits; from there on the walk only steps forward.
//
//   K   A operand, entries x channels    lane: entries l / 4 and + 8, slices 2 (l % 4) and + 1
//   V   A operand, channels x entries    lane: slice l / 4, entries 2 (l % 4), + 1, + 8, + 9
//
// In step s every lane takes pair s of its slices. So channel "k" of a step is not channel k of the
// row, but the same one in the query operand (PairChannel), and the sum does not care; the rows of
// the output operand are named by the same formula. V's words hold two channels of one entry; two
// entries are crossed into two words of one channel each (LowHalves, HighHalves).
//
//   group 2   a bit is a word              group 4   a bit is two words after another
//   group 1   a bit is half a word
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/common/target.h"
#include "kernels/format/value_type.h"

namespace tessera::kernels::cuda {

inline constexpr std::uint32_t kRowSlices = 8;

// The tensor cores' type for rows of these values.
TESSERA_HOST_DEVICE constexpr ElementType OperandType(ValueType values) {
  return values == ValueType::kFp16 ? ElementType::kFp16 : ElementType::kBf16;
}

// Register pair i (0: k 0-7, 1: k 8-15) of a K operand, and of the query operand that meets it.
TESSERA_HOST_DEVICE constexpr std::uint32_t KeySlice(std::uint32_t lane, std::uint32_t i) {
  return lane % 4 * 2 + i;
}
TESSERA_HOST_DEVICE constexpr std::uint32_t ValueSlice(std::uint32_t lane) { return lane / 4; }
// Entry i (0..3) of the four that a lane takes V from; pairs (0, 1) and (2, 3) share registers.
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

// `count` (0..32) bits of a bitmap, from bit `first` on. Reads the two words that bit `first` and
// bit `first` + 32 lie in, whatever the count.
TESSERA_HOST_DEVICE inline std::uint32_t BitsAt(const std::uint32_t* words, std::uint32_t first,
                                                std::uint32_t count) {
  const std::uint64_t both = words[first / 32] | static_cast<std::uint64_t>(words[first / 32 + 1])
                                                     << 32;
  const auto bits = static_cast<std::uint32_t>(both >> (first % 32));
  return count >= 32 ? bits : bits & ((1u << count) - 1);
}

// A slice of one row: its bits, one per group, and how many groups the row keeps before it.
struct RowSlice {
  std::uint32_t bits = 0;
  std::uint32_t before = 0;
};

// The groups of a slice in a row that has `groups` of them: the first, and how many.
template <std::uint32_t kHeadDim, std::uint32_t kGroup>
struct SliceGroups {
  static constexpr std::uint32_t kPer = kHeadDim / kRowSlices / kGroup;  // of a whole slice
  static_assert(kPer >= 1 && kPer <= 32);
  std::uint32_t first;
  std::uint32_t count;

  TESSERA_HOST_DEVICE SliceGroups(std::uint32_t groups, std::uint32_t slice)
      : first(slice * kPer < groups ? slice * kPer : groups),
        count(groups - first < kPer ? groups - first : kPer) {}
};

// Of a row without a bitmap, which keeps every group.
template <std::uint32_t kHeadDim, std::uint32_t kGroup>
TESSERA_HOST_DEVICE inline RowSlice WholeSlice(std::uint32_t groups, std::uint32_t slice) {
  const SliceGroups<kHeadDim, kGroup> own(groups, slice);
  return {.bits = own.count >= 32 ? ~0u : (1u << own.count) - 1, .before = own.first};
}

// How many groups a row keeps before each of its slices: byte s is that of slice s. `words`:
// bitmaps of rows of `row_bits` bytes, one after another, the first word-aligned. Bits from
// `groups` on are other rows'. Reads up to 4 + head_dim / 8 bytes from the row's first byte on, and
// 4 before.
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

// A slice of a row of which `before` groups are kept before it. Bits of channels that the row lacks
// are 0.
template <std::uint32_t kHeadDim, std::uint32_t kGroup>
TESSERA_HOST_DEVICE inline RowSlice FindSlice(const std::uint32_t* words, std::uint32_t row,
                                              std::uint32_t row_bits, std::uint32_t groups,
                                              std::uint32_t slice, std::uint32_t before) {
  const SliceGroups<kHeadDim, kGroup> own(groups, slice);
  return {.bits = BitsAt(words, row * row_bits * 8 + own.first, own.count), .before = before};
}

// Walks the channel pairs of a slice. kBytes per stored value.
template <std::uint32_t kGroup, std::uint32_t kBytes>
class PairWalk {
 public:
  PairWalk() = default;
  // `values`: the row's first. A row that nobody may see is walked with no bits.
  TESSERA_HOST_DEVICE PairWalk(const RowSlice& slice, const std::byte* values)
      : bits_(slice.bits), at_(values + slice.before * kGroup * kBytes) {}

  // The stored values of pair `pair`, the first channel's low; 0 for those that are not kept. To be
  // called with 0, 1, 2, ... in turn.
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

// The upper halves of two floats that are bf16 already.
TESSERA_HOST_DEVICE inline std::uint32_t PackExact(float low, float high) {
  return std::bit_cast<std::uint32_t>(low) >> 16 |
         (std::bit_cast<std::uint32_t>(high) & 0xffff0000u);
}

TESSERA_HOST_DEVICE inline float Int8Value(std::uint32_t stored) {
  // 2^23 + (value + 128), less 2^23 + 128.
  return std::bit_cast<float>(0x4b000000u | ((stored & 0xffu) ^ 0x80u)) - 8388736.0f;
}

TESSERA_HOST_DEVICE inline float Fp8Value(std::uint32_t stored) {
  const std::uint32_t magnitude = stored & 0x7fu;
  // Read as fp32 the bits mean 2^-120 of the value, subnormal ones too.
  const float value = std::bit_cast<float>(magnitude << 20) * 0x1p120f;
  const std::uint32_t bits = magnitude == 0x7f ? 0x7fc00000u : std::bit_cast<std::uint32_t>(value);
  return std::bit_cast<float>((stored & 0x80u) << 24 | bits);
}

// Two stored values as an operand register of OperandType, without their scale. Exact.
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

// From (channel c, channel c + 1) of two entries: channel c of both, channel c + 1 of both.
TESSERA_HOST_DEVICE constexpr std::uint32_t LowHalves(std::uint32_t first, std::uint32_t second) {
  return (first & 0xffffu) | second << 16;
}
TESSERA_HOST_DEVICE constexpr std::uint32_t HighHalves(std::uint32_t first, std::uint32_t second) {
  return first >> 16 | (second & 0xffff0000u);
}

}  // namespace tessera::kernels::cuda
