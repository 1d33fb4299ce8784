// Rows of block summaries as the score kernel takes them: a warp has several under way, and of each
// row lane l holds channels l, l + 32, ...
//
// A packed row's bitmap comes to all lanes by ballots, so the place of a channel's value is a count
// of bits; nothing is read beyond the `kept` values of its row, whatever the bitmap says.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/cuda/gpu.cuh"
#include "kernels/cuda/packed_index.h"
#include "kernels/cuda/step_view.h"
#include "kernels/cuda/tuning.h"

namespace tessera::kernels::cuda {

// How an element of a summary is stored. bf16, fp16, int8, fp8 as in ValueType.
enum class Stored : std::uint8_t { kBf16 = 1, kFp16 = 2, kInt8 = 3, kFp8 = 4, kFp32 = 5 };

TESSERA_HOST_DEVICE constexpr std::uint32_t StoredBytes(Stored stored) {
  return stored == Stored::kFp32 ? 4 : (stored <= Stored::kFp16 ? 2 : 1);
}

template <Stored kStored>
TESSERA_DEVICE float LoadStored(const std::byte* row, std::uint32_t index) {
  if constexpr (kStored == Stored::kFp32) return reinterpret_cast<const float*>(row)[index];
  if constexpr (kStored == Stored::kBf16) {
    const std::uint32_t half = reinterpret_cast<const std::uint16_t*>(row)[index];
    return std::bit_cast<float>(half << 16);
  }
  if constexpr (kStored == Stored::kFp16) {
    return gpu::HalfToFloat(reinterpret_cast<const std::uint16_t*>(row)[index]);
  }
  if constexpr (kStored == Stored::kInt8) return Int8Value(static_cast<std::uint32_t>(row[index]));
  return Fp8Value(static_cast<std::uint32_t>(row[index]));
}

// Where the warp's rows are: the tile of each and its summaries, null where there is none, and its
// block there.
struct SummaryPlaces {
  const std::byte* tile[kScoreRows];
  const std::byte* summaries[kScoreRows];
  std::uint32_t block[kScoreRows];

  // The row's part of an array, null where it has no tile.
  TESSERA_DEVICE const std::byte* RowOf(std::uint32_t r, std::uint32_t array,
                                        std::uint32_t row_bytes) const {
    return summaries[r] == nullptr ? nullptr : summaries[r] + array + block[r] * row_bytes;
  }
  TESSERA_DEVICE const std::byte* DataOf(std::uint32_t r, const TileLayout& layout) const {
    return RowOf(r, layout.block_data, layout.block_row.data);
  }
};

// Means of dense rows.
template <std::uint32_t kHeadDim, Stored kStored>
struct DenseMeans {
  static constexpr std::uint32_t kPer = kHeadDim / 32;
  float mean[kScoreRows][kPer];

  TESSERA_DEVICE void Load(const StepStrategy& strategy, const SummaryPlaces& places) {
    TESSERA_UNROLL
    for (std::uint32_t r = 0; r < kScoreRows; ++r) {
      const std::byte* row = places.DataOf(r, strategy.layout);
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < kPer; ++i) {
        mean[r][i] = row == nullptr ? 0 : LoadStored<kStored>(row, gpu::Lane() + 32 * i);
      }
    }
  }
  TESSERA_DEVICE float Term(std::uint32_t r, std::uint32_t i, float query) const {
    return mean[r][i] * query;
  }
};

// The least and the greatest element of each channel.
template <std::uint32_t kHeadDim, Stored kStored>
struct Extremes {
  static constexpr std::uint32_t kPer = kHeadDim / 32;
  float least[kScoreRows][kPer];
  float greatest[kScoreRows][kPer];

  TESSERA_DEVICE void Load(const StepStrategy& strategy, const SummaryPlaces& places) {
    const std::uint32_t channels = strategy.shape.key.channels;
    TESSERA_UNROLL
    for (std::uint32_t r = 0; r < kScoreRows; ++r) {
      const std::byte* row = places.DataOf(r, strategy.layout);
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < kPer; ++i) {
        const std::uint32_t channel = gpu::Lane() + 32 * i;
        const bool live = row != nullptr && channel < channels;
        least[r][i] = live ? LoadStored<kStored>(row, channel) : 0;
        greatest[r][i] = live ? LoadStored<kStored>(row, channels + channel) : 0;
      }
    }
  }
  TESSERA_DEVICE float Term(std::uint32_t r, std::uint32_t i, float query) const {
    return gpu::Max(least[r][i] * query, greatest[r][i] * query);
  }
};

// Means of packed rows, without their scales.
template <std::uint32_t kHeadDim, Stored kStored, std::uint32_t kGroup>
struct PackedMeans {
  static constexpr std::uint32_t kPer = kHeadDim / 32;
  static constexpr std::uint32_t kWords = (kHeadDim / kGroup + 31) / 32;
  float mean[kScoreRows][kPer];

  TESSERA_DEVICE void Load(const StepStrategy& strategy, const SummaryPlaces& places) {
    std::uint32_t words[kScoreRows][kWords];
    LoadBits(strategy, places, words);
    TESSERA_UNROLL
    for (std::uint32_t r = 0; r < kScoreRows; ++r) {
      const std::byte* row = places.DataOf(r, strategy.layout);
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < kPer; ++i) {
        const std::uint32_t channel = gpu::Lane() + 32 * i;
        const std::uint32_t word = i / kGroup;  // that the group's bit is in
        const std::uint32_t bit = channel / kGroup % 32;
        std::uint32_t before = CountBits(words[r][word] & ((1u << bit) - 1));
        TESSERA_UNROLL
        for (std::uint32_t w = 0; w < word; ++w) before += CountBits(words[r][w]);
        const std::uint32_t index = before * kGroup + channel % kGroup;
        const bool kept = (words[r][word] >> bit & 1) != 0 && index < strategy.shape.key.kept;
        mean[r][i] = kept ? LoadStored<kStored>(row, index) : 0;
      }
    }
  }
  TESSERA_DEVICE float Term(std::uint32_t r, std::uint32_t i, float query) const {
    return mean[r][i] * query;
  }

 private:
  // Each lane reads the bit of a group of its own in a word; rows without a tile have no bits.
  TESSERA_DEVICE static void LoadBits(const StepStrategy& strategy, const SummaryPlaces& places,
                                      std::uint32_t (&words)[kScoreRows][kWords]) {
    const std::uint32_t groups = strategy.shape.key.channels / strategy.shape.group;
    const bool whole = strategy.layout.block_row.bits == 0;  // every channel is stored
    std::uint32_t bytes[kScoreRows][kWords];
    TESSERA_UNROLL
    for (std::uint32_t r = 0; r < kScoreRows; ++r) {
      const std::byte* bits =
          places.RowOf(r, strategy.layout.block_bits, strategy.layout.block_row.bits);
      TESSERA_UNROLL
      for (std::uint32_t w = 0; w < kWords; ++w) {
        const std::uint32_t group = w * 32 + gpu::Lane();
        const bool live = bits != nullptr && group < groups;
        bytes[r][w] = !live ? 0 : whole ? 0xffu : static_cast<std::uint32_t>(bits[group / 8]);
      }
    }
    TESSERA_UNROLL
    for (std::uint32_t r = 0; r < kScoreRows; ++r) {
      TESSERA_UNROLL
      for (std::uint32_t w = 0; w < kWords; ++w) {
        words[r][w] = gpu::Ballot((bytes[r][w] >> (gpu::Lane() % 8) & 1) != 0);
      }
    }
  }
};

}  // namespace tessera::kernels::cuda
