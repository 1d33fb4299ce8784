// Loads rows of block summaries as tensor-core operands. A warp has a tile of 16 rows. Lane l holds
// 16-byte chunks of rows l / 4 and l / 4 + 8: chunk l % 4, then every fourth.
//
//   step       16 channels: those that the lanes hold in half a chunk (16-bit elements) or in a
//              whole one (fp32). The query operand uses the same channel order, so the sum over
//              channels is unaffected
//   extremes   sum of max(q min, q max) = max x q+ + min x q-: two products
//   fp32       x = high + low in bf16: three products
//   packed     rows are expanded to shared memory first. Never reads beyond the `kept` values of a
//              row, whatever its bitmap says
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/cuda/common/fragment.h"
#include "kernels/cuda/common/gpu.cuh"
#include "kernels/cuda/common/packed_index.h"
#include "kernels/cuda/common/step_view.h"
#include "kernels/cuda/common/tuning.h"

namespace tessera::kernels::cuda {

// Element type of a stored summary. bf16, fp16, int8 and fp8 as in ValueType.
enum class Stored : std::uint8_t { kBf16 = 1, kFp16 = 2, kInt8 = 3, kFp8 = 4, kFp32 = 5 };

TESSERA_HOST_DEVICE constexpr std::uint32_t StoredBytes(Stored stored) {
  return stored == Stored::kFp32 ? 4 : (stored <= Stored::kFp16 ? 2 : 1);
}
// The tensor-core operand type for it.
TESSERA_HOST_DEVICE constexpr ElementType ScoreType(Stored stored) {
  return stored == Stored::kFp16 ? ElementType::kFp16 : ElementType::kBf16;
}

// Rows that a warp scores at once: the M of m16n8k16.
inline constexpr std::uint32_t kScoreRows = 16;

// Shape of the products for one form of rows.
template <std::uint32_t kHeadDimValue, Stored kStoredValue, bool kExtremesValue>
struct ScoreShape {
  static constexpr std::uint32_t kHeadDim = kHeadDimValue;
  static constexpr Stored kStored = kStoredValue;
  static constexpr bool kExtremes = kExtremesValue;
  static constexpr bool kSplit = kStored == Stored::kFp32;
  static constexpr ElementType kType = ScoreType(kStored);
  static constexpr std::uint32_t kSteps = kHeadDim / 16;
  static constexpr std::uint32_t kSigns = kExtremes ? 2 : 1;
  // Operand parts of a query: its rows unchanged, or split into positive and negative elements;
  // each split again into high and low halves for fp32 summaries.
  static constexpr std::uint32_t kQueryParts = kSigns * (kSplit ? 2 : 1);
};

// The first of the two channels in register pair `i` of a step's operands.
template <bool kSplit>
TESSERA_HOST_DEVICE constexpr std::uint32_t ScoreChannel(std::uint32_t lane, std::uint32_t step,
                                                         std::uint32_t i) {
  return kSplit ? (lane % 4 + 4 * step) * 4 + i * 2
                : (lane % 4 + 4 * (step / 2)) * 8 + step % 2 * 4 + i * 2;
}

// Bytes of the query operands in shared memory, [part][step][lane][register].
TESSERA_HOST_DEVICE constexpr std::uint32_t ScoreQueryBytes(std::uint32_t head_dim,
                                                            std::uint32_t parts) {
  return parts * (head_dim / 16) * kWarp * 2 * 4;
}

TESSERA_DEVICE float TruncateToBf16(float x) {
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(x) & 0xffff0000u);
}

// Keeps the negative elements of two 16-bit elements, or the non-negative ones, and zeroes the
// rest. A NaN is kept in exactly one of the two.
TESSERA_HOST_DEVICE constexpr std::uint32_t PairOfSign(std::uint32_t pair, bool negative) {
  const std::uint32_t below = (pair >> 15 & 0x00010001u) * 0xffffu;
  return pair & (negative ? below : ~below);
}

// One part of a query element.
template <class Shape>
TESSERA_DEVICE float QueryPart(float element, std::uint32_t part) {
  if constexpr (Shape::kExtremes) {
    const bool negative = part % 2 != 0;
    if (negative ? element >= 0 : element < 0) element = 0;
  }
  if constexpr (Shape::kSplit) {
    const float high = TruncateToBf16(element);
    return part / Shape::kSigns == 0 ? high : element - high;
  }
  return element;
}

// Loads 16 bytes of a row from `at` on, with zeros from `bytes` on. `row` is a multiple of 2.
TESSERA_DEVICE gpu::Chunk LoadChunk(const std::byte* row, std::uint32_t at, std::uint32_t bytes) {
  gpu::Chunk chunk = {};
  if (row == nullptr || at >= bytes) return chunk;
  const auto address = reinterpret_cast<std::uintptr_t>(row + at);
  if (address % kChunkBytes == 0 && at + kChunkBytes <= bytes) {
    return *reinterpret_cast<const gpu::Chunk*>(row + at);
  }
  TESSERA_UNROLL
  for (std::uint32_t w = 0; w < 4; ++w) {
    const std::uint32_t from = at + w * 4;
    if (address % 4 == 0 && from + 4 <= bytes) {
      chunk.words[w] = *reinterpret_cast<const std::uint32_t*>(row + from);
      continue;
    }
    if (from + 2 <= bytes) chunk.words[w] = *reinterpret_cast<const std::uint16_t*>(row + from);
    if (from + 4 <= bytes) {
      chunk.words[w] |=
          static_cast<std::uint32_t>(*reinterpret_cast<const std::uint16_t*>(row + from + 2)) << 16;
    }
  }
  return chunk;
}

// Builds the A operands of the steps that a chunk of two rows covers, and passes them to
// multiply(step, part of the query, operand).
template <class Shape, class Multiply>
TESSERA_DEVICE void MultiplyChunk(const gpu::Chunk& first, const gpu::Chunk& second,
                                  std::uint32_t chunk, std::uint32_t sign, Multiply multiply) {
  if constexpr (Shape::kSplit) {
    std::uint32_t high[4];
    std::uint32_t low[4];
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < 4; ++i) {
      const gpu::Chunk& row = i % 2 == 0 ? first : second;
      const auto a = std::bit_cast<float>(row.words[i / 2 * 2]);
      const auto b = std::bit_cast<float>(row.words[i / 2 * 2 + 1]);
      high[i] = gpu::PackPair<ElementType::kBf16>(TruncateToBf16(a), TruncateToBf16(b));
      low[i] = gpu::PackPair<ElementType::kBf16>(a - TruncateToBf16(a), b - TruncateToBf16(b));
    }
    multiply(chunk, sign, high);
    multiply(chunk, sign, low);
    multiply(chunk, sign + Shape::kSigns, high);
  } else {
    TESSERA_UNROLL
    for (std::uint32_t half = 0; half < 2; ++half) {
      const std::uint32_t operand[4] = {first.words[2 * half], second.words[2 * half],
                                        first.words[2 * half + 1], second.words[2 * half + 1]};
      multiply(2 * chunk + half, sign, operand);
    }
  }
}

// Multiplies a lane's two rows as they are stored. Without extremes, the rows are means and take
// the role of `greatest`.
template <class Shape, class Multiply>
TESSERA_DEVICE void MultiplyStored(const std::byte* const (&rows)[2], std::uint32_t channels,
                                   Multiply multiply) {
  constexpr std::uint32_t kChunks = Shape::kHeadDim * StoredBytes(Shape::kStored) / 64;
  const std::uint32_t bytes = channels * StoredBytes(Shape::kStored);
  TESSERA_UNROLL
  for (std::uint32_t sign = 0; sign < Shape::kSigns; ++sign) {
    // The minima are stored first.
    const std::uint32_t begin = Shape::kExtremes && sign == 0 ? bytes : 0;
    gpu::Chunk chunks[2][kChunks];
    TESSERA_UNROLL
    for (std::uint32_t c = 0; c < kChunks; ++c) {
      const std::uint32_t at = (gpu::Lane() % 4 + 4 * c) * kChunkBytes;
      TESSERA_UNROLL
      for (std::uint32_t r = 0; r < 2; ++r) {
        chunks[r][c] = LoadChunk(rows[r] == nullptr ? nullptr : rows[r] + begin, at, bytes);
      }
    }
    TESSERA_UNROLL
    for (std::uint32_t c = 0; c < kChunks; ++c) {
      MultiplyChunk<Shape>(chunks[0][c], chunks[1][c], c, sign, multiply);
    }
  }
}

// ---- Packed rows

// Bytes between expanded rows. The padding puts their chunks into different banks.
TESSERA_HOST_DEVICE constexpr std::uint32_t WrittenRowBytes(std::uint32_t head_dim) {
  return head_dim * 2 + kChunkBytes;
}

// Expands 32 channels of a row from their bits. `index` is the number of values before them.
template <Stored kStored, std::uint32_t kGroup>
TESSERA_DEVICE void WriteRun(const std::byte* values, std::uint32_t bits, std::uint32_t kept,
                             std::uint32_t& index, std::byte* target) {
  constexpr auto kValues = static_cast<ValueType>(kStored);
  constexpr std::uint32_t kBytes = StoredBytes(kStored);
  const auto load = [&](std::uint32_t channel) -> std::uint32_t {
    const bool here = (bits >> (channel / kGroup) & 1) != 0 && index < kept;
    if (!here) return 0;
    const std::byte* value = values + index * kBytes;
    ++index;
    if constexpr (kBytes == 2) return *reinterpret_cast<const std::uint16_t*>(value);
    return static_cast<std::uint32_t>(*value);
  };
  TESSERA_UNROLL
  for (std::uint32_t c = 0; c < 4; ++c) {
    gpu::Chunk chunk;
    TESSERA_UNROLL
    for (std::uint32_t w = 0; w < 4; ++w) {
      const std::uint32_t low = load(c * 8 + w * 2);
      const std::uint32_t high = load(c * 8 + w * 2 + 1);
      chunk.words[w] = ToOperand<kValues>(low | high << (8 * kBytes));
    }
    *reinterpret_cast<gpu::Chunk*>(target + c * kChunkBytes) = chunk;
  }
}

// Bits [first, first + count) of a row's bitmap. count is at most 32; `first` is a multiple of 8.
TESSERA_DEVICE std::uint32_t BitmapBits(const std::byte* bitmap, std::uint32_t first,
                                        std::uint32_t count) {
  std::uint32_t bits = 0;
  TESSERA_UNROLL
  for (std::uint32_t b = 0; b < 4; ++b) {
    if (b * 8 < count) bits |= static_cast<std::uint32_t>(bitmap[first / 8 + b]) << (8 * b);
  }
  return count >= 32 ? bits : bits & ((1u << count) - 1);
}

// Expands 16 rows of means: lanes 2 r and 2 r + 1 write half of row r each. `summaries` and
// `in_tile` locate the lane's row; null `summaries` write zeros.
template <std::uint32_t kHeadDim, Stored kStored, std::uint32_t kGroup>
TESSERA_DEVICE void WriteMeans(const StepStrategy& strategy, const std::byte* summaries,
                               std::uint32_t in_tile, std::byte* written) {
  constexpr std::uint32_t kRuns = kHeadDim / 64;
  const TileLayout& layout = strategy.layout;
  const std::uint32_t half = gpu::Lane() % 2;
  const std::uint32_t groups = strategy.shape.key.channels / kGroup;
  const bool whole = layout.block_row.bits == 0;  // every channel is stored
  const std::byte* bitmap = summaries + layout.block_bits + in_tile * layout.block_row.bits;
  const std::byte* values = summaries + layout.block_data + in_tile * layout.block_row.data;
  std::uint32_t bits[kRuns];
  std::uint32_t own = 0;
  TESSERA_UNROLL
  for (std::uint32_t r = 0; r < kRuns; ++r) {
    const std::uint32_t first = (half * kRuns + r) * (32 / kGroup);
    const std::uint32_t left = groups > first ? groups - first : 0;
    const std::uint32_t count = left < 32 / kGroup ? left : 32 / kGroup;
    bits[r] = summaries == nullptr || count == 0 ? 0
              : whole                            ? (count >= 32 ? ~0u : (1u << count) - 1)
                                                 : BitmapBits(bitmap, first, count);
    own += CountBits(bits[r]);
  }
  const auto other = static_cast<std::uint32_t>(gpu::Shuffle(own, gpu::Lane() ^ 1));
  std::uint32_t index = half == 0 ? 0 : other * kGroup;
  std::byte* target =
      // 2 bytes per channel
      written + gpu::Lane() / 2 * WrittenRowBytes(kHeadDim) + half * kHeadDim;
  TESSERA_NO_UNROLL
  for (std::uint32_t r = 0; r < kRuns; ++r) {
    std::uint32_t run = bits[0];
    TESSERA_UNROLL
    for (std::uint32_t i = 1; i < kRuns; ++i) run = r == i ? bits[i] : run;
    WriteRun<kStored, kGroup>(values, run, strategy.shape.key.kept, index, target + r * 64);
  }
}

// Multiplies rows l / 4 and l / 4 + 8 of the expanded rows.
template <class Shape, class Multiply>
TESSERA_DEVICE void MultiplyWritten(const std::byte* written, Multiply multiply) {
  const std::byte* row = written + gpu::Lane() / 4 * WrittenRowBytes(Shape::kHeadDim);
  TESSERA_UNROLL
  for (std::uint32_t c = 0; c < Shape::kHeadDim / 32; ++c) {
    const std::byte* at = row + (gpu::Lane() % 4 + 4 * c) * kChunkBytes;
    MultiplyChunk<Shape>(
        *reinterpret_cast<const gpu::Chunk*>(at),
        *reinterpret_cast<const gpu::Chunk*>(at + 8 * WrittenRowBytes(Shape::kHeadDim)), c, 0,
        multiply);
  }
}

}  // namespace tessera::kernels::cuda
