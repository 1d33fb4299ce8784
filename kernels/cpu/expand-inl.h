// Packed rows become plain ones, over the vocabulary `Simd` that the including file has chosen.
// Internal linkage throughout: see README.md.
//
// Values go to lanes: a step takes the bits of kStepChannels channels and the values behind them
// and puts each value where its bit is. 8-bit values become bf16, which holds them exactly; their
// scale is a factor of the row.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/tile_math-inl.h"
#include "kernels/format/part.h"

namespace tessera::kernels {
namespace {

// Which kind of plain row the values become.
template <ValueType kValues>
constexpr ElementType kExpandedType =
    kValues == ValueType::kFp16 ? ElementType::kFp16 : ElementType::kBf16;

template <ValueType kValues>
constexpr int kValueBytes = kValues == ValueType::kBf16 || kValues == ValueType::kFp16 ? 2 : 1;

// One array of packed rows in a tile.
struct PackedRows {
  const std::byte* tile_end;
  const std::byte* bits;
  const std::byte* scales;
  const std::byte* data;
  std::uint32_t row_bits;
  std::uint32_t row_scale;
  std::uint32_t row_data;
  int channels;
};

constexpr int kStepBytes = 64;

TESSERA_SIMD PackedRows KeysOf(const TileShape& shape, const TileLayout& layout,
                               const std::byte* tile) {
  return {.tile_end = tile + layout.bytes,
          .bits = tile + layout.key_bits,
          .scales = tile + layout.key_scales,
          .data = tile + layout.key_data,
          .row_bits = layout.row_bits,
          .row_scale = layout.row_scale,
          .row_data = layout.row_data,
          .channels = shape.channels};
}

TESSERA_SIMD PackedRows ValuesOfTile(const TileShape& shape, const TileLayout& layout,
                                     const std::byte* tile) {
  PackedRows rows = KeysOf(shape, layout, tile);
  rows.bits = tile + layout.value_bits;
  rows.scales = tile + layout.value_scales;
  rows.data = tile + layout.value_data;
  return rows;
}

TESSERA_SIMD PackedRows BlocksOfTile(const TileShape& shape, const TileLayout& layout,
                                     const std::byte* tile) {
  PackedRows rows = KeysOf(shape, layout, tile);
  rows.bits = tile + layout.block_bits;
  rows.scales = tile + layout.block_scales;
  rows.data = tile + layout.block_data;
  return rows;
}

// The bits of the step that begins at channel c: one per group, none beyond the row's channels.
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

// What will be expanded about a tile later: requested row by row behind the rows of now, since a
// burst of requests for a whole tile would stop the core until memory has answered.
struct Ahead {
  const std::byte* bits;  // of the row that corresponds to the first one now; null: nothing
  const std::byte* data;
};

TESSERA_SIMD void PrefetchRow(const PackedRows& rows, const Ahead& ahead, std::uint32_t row) {
  if (ahead.data == nullptr) return;
  PrefetchLines(ahead.data + row * rows.row_data, rows.row_data);
  const std::uint32_t at = row * rows.row_bits;
  if (at % kLine < rows.row_bits) PrefetchLines(ahead.bits + at, 1);
}

// One row: its bitmap, its values, and the last address from which a step may load.
struct PackedRow {
  const std::byte* bits;
  const std::byte* data;
  const std::byte* last_load;
};

// A row of kSteps whole steps at once: every step's place is known before the first is expanded.
template <ValueType kValues, int kGroup, int kSteps>
TESSERA_SIMD void ExpandWhole(const PackedRow& row, std::uint32_t row_data,
                              typename Simd::Words (&words)[kSteps]) {
  constexpr int kUnit = kGroup * kValueBytes<kValues>;
  const std::byte* data = row.data;
  std::uint32_t step_bits[kSteps];
  const std::byte* from[kSteps];
  TESSERA_UNROLL for (int i = 0; i < kSteps; ++i) {
    const int c = i * Simd::kStepChannels;
    step_bits[i] = StepBits<kGroup>(row.bits, c, c + Simd::kStepChannels);
    from[i] = data;
    data += static_cast<std::ptrdiff_t>(kUnit) * __builtin_popcount(step_bits[i]);
  }
  if (data > row.data + row_data) [[unlikely]] {  // garbage
    for (int i = 0; i < kSteps; ++i) {
      from[i] = from[i] < row.last_load ? from[i] : row.last_load;
    }
  }
  TESSERA_UNROLL for (int i = 0; i < kSteps; ++i) {
    words[i] = Simd::template ExpandStep<kValues, kGroup>(step_bits[i], from[i]);
  }
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

// The last rows of a tile, copied to where 64 bytes more may be read.
struct RowTail {
  alignas(64) std::byte bytes[kMaxHeadDim * 2 + 2 * kStepBytes];
};

// Calls visit(index, row) for rows [first, first + count), in order. Steps may load what stands
// behind a row, which nobody uses, but nothing behind the tile.
template <class Visit>
TESSERA_SIMD void ForEachRow(const PackedRows& rows, std::uint32_t first, std::uint32_t count,
                             const Ahead& ahead, Visit visit) {
  const std::byte* bits = rows.bits + first * rows.row_bits;
  const std::byte* data = rows.data + first * rows.row_data;
  const std::byte* last_load = rows.tile_end - kStepBytes;
  std::uint32_t i = 0;
  for (; i < count && data + rows.row_data <= last_load; ++i) {
    visit(i, PackedRow{bits, data, last_load});
    PrefetchRow(rows, ahead, i);
    bits += rows.row_bits;
    data += rows.row_data;
  }
  if (i == count) return;
  RowTail tail;
  const std::size_t left = (count - i) * std::size_t{rows.row_data};
  if (left == kStepBytes) {  // by far the most frequent: a quarter of 128 channels
    Simd::CopyStep(data, tail.bytes);
  } else {
    __builtin_memcpy(tail.bytes, data, left);
  }
  for (data = tail.bytes; i < count; ++i) {
    visit(i, PackedRow{bits, data, tail.bytes + sizeof(tail.bytes) - kStepBytes});
    PrefetchRow(rows, ahead, i);
    bits += rows.row_bits;
    data += rows.row_data;
  }
}

// Calls run.operator()<steps>() where rows of this many channels are whole steps of a usual count,
// else run.operator()<0>().
template <class Run>
TESSERA_SIMD void WithSteps(int channels, Run run) {
  if (channels == 128) return run.template operator()<128 / Simd::kStepChannels>();
  if (channels == 64) return run.template operator()<64 / Simd::kStepChannels>();
  run.template operator()<0>();
}

// Rows [first, first + count) as plain rows of `padded` words each, one behind the other.
template <ValueType kValues, int kGroup>
TESSERA_SIMD void ExpandRows(const PackedRows& rows, std::uint32_t first, std::uint32_t count,
                             int padded, const Ahead& ahead, std::byte* to) {
  WithSteps(rows.channels, [&]<int kSteps>() TESSERA_INLINE_LAMBDA {
    ForEachRow(rows, first, count, ahead,
               [&](std::uint32_t, const PackedRow& row) TESSERA_INLINE_LAMBDA {
                 if constexpr (kSteps == 0) {
                   ExpandStepwise<kValues, kGroup>(row, rows.channels, padded, to);
                 } else {
                   typename Simd::Words words[kSteps];
                   ExpandWhole<kValues, kGroup, kSteps>(row, rows.row_data, words);
                   TESSERA_UNROLL for (int i = 0; i < kSteps; ++i) {
                     Simd::StoreWords(to + 2 * Simd::kStepChannels * i, words[i]);
                   }
                 }
                 to += 2 * padded;
               });
  });
}

// Their scales in fp32; only of rows that have one.
TESSERA_SIMD void ReadScales(const PackedRows& rows, std::uint32_t first, std::uint32_t count,
                             float* to) {
  for (std::uint32_t r = 0; r < count; ++r) {
    std::uint16_t bits;
    __builtin_memcpy(&bits, rows.scales + (first + r) * rows.row_scale, sizeof(bits));
    to[r] = __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) << 16);
  }
}

// Calls run.operator()<values, group>() with the shape's value type and group as constants. Only of
// packed shapes.
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
