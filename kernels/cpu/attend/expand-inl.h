// Expands packed rows to full rows. Written over the including file's `Simd`. Internal linkage
// throughout: see ../README.md.
//
// A step takes the bits of kStepChannels channels and the stored values from the current address,
// and moves each value to its channel. 8-bit values become bf16, which holds them exactly; the
// scale is applied per row later.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attend/tile_math-inl.h"
#include "kernels/format/part.h"

namespace tessera::kernels {
namespace {

// The element type of expanded rows.
template <ValueType kValues>
constexpr ElementType kExpandedType =
    kValues == ValueType::kFp16 ? ElementType::kFp16 : ElementType::kBf16;

template <ValueType kValues>
constexpr int kValueBytes = kValues == ValueType::kBf16 || kValues == ValueType::kFp16 ? 2 : 1;

// One array of packed rows, of a tile or of its summaries.
struct PackedRows {
  const std::byte* end;   // end of the tile, or of its summaries
  const std::byte* bits;  // points to kAllBits for every row if there are no bitmaps
  const std::byte* scales;
  const std::byte* data;
  std::uint32_t row_bits;
  std::uint32_t row_scale;
  std::uint32_t row_data;
  int channels;
};

constexpr int kStepBytes = 64;

// The bitmap of rows that keep every channel.
alignas(64) constexpr std::uint64_t kAllBits[kMaxHeadDim / 64] = {
    ~std::uint64_t{0}, ~std::uint64_t{0}, ~std::uint64_t{0}, ~std::uint64_t{0}};

TESSERA_SIMD PackedRows KeysOf(const TileShape& shape, const TileLayout& layout,
                               const std::byte* tile) {
  const RowBytes& row = layout.key_row;
  const auto* every = reinterpret_cast<const std::byte*>(kAllBits);
  return {.end = tile + layout.bytes,
          .bits = row.bits != 0 ? tile + layout.key_bits : every,
          .scales = tile + layout.key_scales,
          .data = tile + layout.key_data,
          .row_bits = row.bits,
          .row_scale = row.scale,
          .row_data = row.data,
          .channels = shape.key.channels};
}

TESSERA_SIMD PackedRows ValuesOfTile(const TileShape& shape, const TileLayout& layout,
                                     const std::byte* tile) {
  const RowBytes& row = layout.value_row;
  const auto* every = reinterpret_cast<const std::byte*>(kAllBits);
  return {.end = tile + layout.bytes,
          .bits = row.bits != 0 ? tile + layout.value_bits : every,
          .scales = tile + layout.value_scales,
          .data = tile + layout.value_data,
          .row_bits = row.bits,
          .row_scale = row.scale,
          .row_data = row.data,
          .channels = shape.value.channels};
}

// Mean summaries, which are packed like keys.
TESSERA_SIMD PackedRows BlocksOfTile(const TileShape& shape, const TileLayout& layout,
                                     const std::byte* summaries) {
  const RowBytes& row = layout.block_row;
  const auto* every = reinterpret_cast<const std::byte*>(kAllBits);
  return {.end = summaries + layout.summary_bytes,
          .bits = row.bits != 0 ? summaries + layout.block_bits : every,
          .scales = summaries + layout.block_scales,
          .data = summaries + layout.block_data,
          .row_bits = row.bits,
          .row_scale = row.scale,
          .row_data = row.data,
          .channels = shape.key.channels};
}

// The bits of the step at channel c: one per group, none beyond the row's channels.
template <int kGroup>
TESSERA_SIMD std::uint32_t StepBits(const std::byte* bits, int c, int channels) {
  constexpr int kBits = Simd::kStepChannels / kGroup;
  const int left = (channels - c) / kGroup;
  if (left <= 0) return 0;
  std::uint32_t word;
  if constexpr (kBits == 32) {
    __builtin_memcpy(&word, bits + c / 8, 4);
  } else if constexpr (kBits == 16) {
    std::uint16_t half;
    __builtin_memcpy(&half, bits + c / (8 * kGroup), 2);
    word = half;
  } else {
    const int at = c / kGroup;
    word = static_cast<std::uint32_t>(bits[at / 8]) >> (at % 8) & ((1u << kBits) - 1);
  }
  return left >= kBits ? word : word & ((1u << left) - 1);
}

// One row: its bitmap, its values, and the last address that a step may load from.
struct PackedRow {
  const std::byte* bits;
  const std::byte* data;
  const std::byte* last_load;
};

// The number of bits set in the first kBytes of a bitmap.
template <int kBytes>
TESSERA_SIMD std::uint32_t CountBits(const std::byte* bits) {
  static_assert(kBytes == 2 || kBytes == 4 || kBytes % 8 == 0);
  std::uint64_t word = 0;
  if constexpr (kBytes < 8) {
    __builtin_memcpy(&word, bits, kBytes);
    return static_cast<std::uint32_t>(__builtin_popcountll(word));
  }
  std::uint32_t count = 0;
  TESSERA_UNROLL for (int i = 0; i < kBytes; i += 8) {
    __builtin_memcpy(&word, bits + i, 8);
    count += static_cast<std::uint32_t>(__builtin_popcountll(word));
  }
  return count;
}

alignas(64) constexpr std::byte kNoBits[kMaxHeadDim / 8] = {};

// Steps [kFirst, kFirst + kCount) of a row of kSteps whole steps. As many bytes as a full row has
// must be readable: a garbage bitmap may place values that far past the row.
template <ValueType kValues, int kGroup, int kSteps, int kFirst, int kCount>
TESSERA_SIMD void ExpandSteps(const std::byte* bits, const std::byte* data,
                              typename Simd::Words (&words)[kCount]) {
  // The bitmap is read twice, to be counted and as masks: a mask loaded from memory is cheaper than
  // one moved from a general register.
  const std::byte* masks = bits;
  asm("" : "+r"(masks));
  TESSERA_UNROLL for (int i = 0; i < kFirst + kCount; ++i) {
    const int c = i * Simd::kStepChannels;
    const int end = c + Simd::kStepChannels;
    if (i >= kFirst) {
      words[i - kFirst] =
          Simd::template ExpandStep<kValues, kGroup>(StepBits<kGroup>(masks, c, end), data);
    }
    data += static_cast<std::ptrdiff_t>(kGroup * kValueBytes<kValues>) *
            __builtin_popcount(StepBits<kGroup>(bits, c, end));
  }
}

// All steps of a row that may be the last one of its tile.
template <ValueType kValues, int kGroup, int kSteps>
TESSERA_SIMD void ExpandWhole(const PackedRow& row, std::uint32_t row_data,
                              typename Simd::Words (&words)[kSteps]) {
  constexpr std::uint32_t kUnit = kGroup * kValueBytes<kValues>;
  const std::byte* bits = row.bits;
  // More bits than values means garbage, which must not lead past the tile.
  if (kUnit * CountBits<kSteps * Simd::kStepChannels / kGroup / 8>(bits) > row_data) [[unlikely]] {
    bits = kNoBits;
  }
  ExpandSteps<kValues, kGroup, kSteps, 0, kSteps>(bits, row.data, words);
}

// The same for any number of channels, step by step.
template <ValueType kValues, int kGroup>
TESSERA_SIMD void ExpandStepwise(const PackedRow& row, int channels, int padded, std::byte* to) {
  const std::byte* data = row.data;
  for (int c = 0; c < padded; c += Simd::kStepChannels) {
    const std::uint32_t word = StepBits<kGroup>(row.bits, c, channels);
    const std::byte* from = data < row.last_load ? data : row.last_load;
    Simd::StoreWords(to, Simd::template ExpandStep<kValues, kGroup>(word, from));
    data += static_cast<std::ptrdiff_t>(kGroup * kValueBytes<kValues>) * __builtin_popcount(word);
    to += 2 * Simd::kStepChannels;
  }
}

// The last rows of a tile, copied so that 64 more bytes may be read.
struct RowTail {
  alignas(64) std::byte bytes[kMaxHeadDim * 2 + 2 * kStepBytes];
};

// Calls visit(index, row) for rows [first, first + count), in order. Steps may load (unused) bytes
// after a row, but nothing past `rows.end`.
template <class Visit>
TESSERA_SIMD void ForEachRow(const PackedRows& rows, std::uint32_t first, std::uint32_t count,
                             Visit visit) {
  const std::byte* bits = rows.bits + first * rows.row_bits;
  const std::byte* data = rows.data + first * rows.row_data;
  const std::byte* last_load = rows.end - kStepBytes;
  std::uint32_t i = 0;
  for (; i < count && data + rows.row_data <= last_load; ++i) {
    visit(i, PackedRow{bits, data, last_load});
    bits += rows.row_bits;
    data += rows.row_data;
  }
  if (i == count) return;
  RowTail tail;
  const std::size_t left = (count - i) * std::size_t{rows.row_data};
  if (left == kStepBytes) {  // the most frequent case: a quarter of 128 channels
    Simd::CopyStep(data, tail.bytes);
  } else {
    __builtin_memcpy(tail.bytes, data, left);
  }
  for (data = tail.bytes; i < count; ++i) {
    visit(i, PackedRow{bits, data, tail.bytes + sizeof(tail.bytes) - kStepBytes});
    bits += rows.row_bits;
    data += rows.row_data;
  }
}

// Calls run.operator()<steps>() if rows with this many channels are whole steps of a common count
// without padding, otherwise run.operator()<0>().
template <class Run>
TESSERA_SIMD void WithSteps(int channels, int padded, Run run) {
  if (channels == padded) {
    if (channels == 128) return run.template operator()<128 / Simd::kStepChannels>();
    if (channels == 64) return run.template operator()<64 / Simd::kStepChannels>();
  }
  run.template operator()<0>();
}

// Expands one row to `padded` words. kSteps comes from WithSteps.
template <ValueType kValues, int kGroup, int kSteps>
TESSERA_SIMD void ExpandRow(const PackedRow& row, std::uint32_t row_data, int channels, int padded,
                            std::byte* to) {
  if constexpr (kSteps == 0) {
    ExpandStepwise<kValues, kGroup>(row, channels, padded, to);
  } else {
    typename Simd::Words words[kSteps];
    ExpandWhole<kValues, kGroup, kSteps>(row, row_data, words);
    TESSERA_UNROLL for (int i = 0; i < kSteps; ++i) {
      Simd::StoreWords(to + 2 * Simd::kStepChannels * i, words[i]);
    }
  }
}

// Expands rows [first, first + count) contiguously.
template <ValueType kValues, int kGroup>
TESSERA_SIMD void ExpandRows(const PackedRows& rows, std::uint32_t first, std::uint32_t count,
                             int padded, std::byte* to) {
  WithSteps(rows.channels, padded, [&]<int kSteps>() TESSERA_INLINE_LAMBDA {
    ForEachRow(rows, first, count, [&](std::uint32_t, const PackedRow& row) TESSERA_INLINE_LAMBDA {
      ExpandRow<kValues, kGroup, kSteps>(row, rows.row_data, rows.channels, padded, to);
      to += 2 * padded;
    });
  });
}

// The scales of rows in fp32; only for rows that have one.
TESSERA_SIMD void ReadScales(const PackedRows& rows, std::uint32_t first, std::uint32_t count,
                             float* to) {
  for (std::uint32_t r = 0; r < count; ++r) {
    std::uint16_t bits;
    __builtin_memcpy(&bits, rows.scales + (first + r) * rows.row_scale, sizeof(bits));
    to[r] = __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) << 16);
  }
}

// Calls run.operator()<values, group>() with the shape's value type and group as constants. Packed
// shapes only.
template <ValueType kValues, class Run>
TESSERA_SIMD void WithGroup(const TileShape& shape, Run run) {
  switch (shape.group) {
    case 1:
      return run.template operator()<kValues, 1>();
    case 2:
      return run.template operator()<kValues, 2>();
    default:
      return run.template operator()<kValues, 4>();
  }
}

template <class Run>
TESSERA_SIMD void WithValues(const TileShape& shape, Run run) {
  switch (shape.format) {
    case TileFormat::kPackedBf16:
      return WithGroup<ValueType::kBf16>(shape, run);
    case TileFormat::kPackedFp16:
      return WithGroup<ValueType::kFp16>(shape, run);
    case TileFormat::kPackedInt8:
      return WithGroup<ValueType::kInt8>(shape, run);
    case TileFormat::kPackedFp8:
      return WithGroup<ValueType::kFp8>(shape, run);
    default:
      return;
  }
}

}  // namespace
}  // namespace tessera::kernels
