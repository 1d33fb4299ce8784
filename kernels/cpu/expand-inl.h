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
  const std::byte* bits;
  const std::byte* scales;
  const std::byte* data;
  std::uint32_t row_bits;
  std::uint32_t row_scale;
  std::uint32_t row_data;
  int channels;
  const std::byte* last_load;  // a step may read 64 bytes from here on, and no further
};

constexpr int kStepBytes = 64;

TESSERA_SIMD PackedRows KeysOf(const TileShape& shape, const TileLayout& layout,
                               const std::byte* tile) {
  return {.bits = tile + layout.key_bits,
          .scales = tile + layout.key_scales,
          .data = tile + layout.key_data,
          .row_bits = layout.row_bits,
          .row_scale = layout.row_scale,
          .row_data = layout.row_data,
          .channels = shape.channels,
          .last_load = tile + layout.bytes - kStepBytes};
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

// One row on its way: where the next step's values lie.
template <ValueType kValues, int kGroup>
struct RowReader {
  const std::byte* bits;
  const std::byte* data;
  const std::byte* last_load;
  int channels;

  TESSERA_MEMBER typename Simd::Words Step(int c) {
    const std::uint32_t word = StepBits<kGroup>(bits, c, channels);
    const std::ptrdiff_t left = last_load + kStepBytes - data;
    const int readable = left >= kStepBytes ? kStepBytes : left > 0 ? static_cast<int>(left) : 0;
    const auto words = Simd::template ExpandStep<kValues, kGroup>(word, data, readable);
    data += static_cast<std::ptrdiff_t>(kGroup * kValueBytes<kValues>) * __builtin_popcount(word);
    return words;
  }
};

template <ValueType kValues, int kGroup>
TESSERA_SIMD RowReader<kValues, kGroup> ReadRow(const PackedRows& rows, std::uint32_t row) {
  return {.bits = rows.bits + row * rows.row_bits,
          .data = rows.data + row * rows.row_data,
          .last_load = rows.last_load,
          .channels = rows.channels};
}

// A row of kSteps whole steps at once: every step's place is known before the first is expanded.
// Reads up to 64 bytes behind the row, none behind `last_load` + 64.
template <ValueType kValues, int kGroup, int kSteps>
TESSERA_SIMD void ExpandWhole(const std::byte* bits, const std::byte* data,
                              const std::byte* last_load, typename Simd::Words (&words)[kSteps]) {
  constexpr int kUnit = kGroup * kValueBytes<kValues>;
  std::uint32_t step_bits[kSteps];
  const std::byte* from[kSteps];
  TESSERA_UNROLL for (int i = 0; i < kSteps; ++i) {
    const int c = i * Simd::kStepChannels;
    step_bits[i] = StepBits<kGroup>(bits, c, c + Simd::kStepChannels);
    from[i] = data < last_load ? data : last_load;
    data += static_cast<std::ptrdiff_t>(kUnit) * __builtin_popcount(step_bits[i]);
  }
  TESSERA_UNROLL for (int i = 0; i < kSteps; ++i) {
    words[i] = Simd::template ExpandStep<kValues, kGroup>(step_bits[i], from[i], kStepBytes);
  }
}

// Whether the first `count` rows may be read by ExpandWhole: each has whole steps, and 64 bytes of
// the tile behind it.
template <int kSteps>
TESSERA_SIMD std::uint32_t WholeRows(const PackedRows& rows, std::uint32_t first,
                                     std::uint32_t count) {
  if (rows.channels != kSteps * Simd::kStepChannels) return 0;
  while (count > 0 && rows.data + (first + count) * rows.row_data > rows.last_load) --count;
  return count;
}

template <ValueType kValues, int kGroup, int kSteps>
TESSERA_SIMD std::uint32_t ExpandWholeRows(const PackedRows& rows, std::uint32_t first,
                                           std::uint32_t count, std::byte* to) {
  const std::uint32_t whole = WholeRows<kSteps>(rows, first, count);
  for (std::uint32_t r = first; r < first + whole; ++r) {
    typename Simd::Words words[kSteps];
    ExpandWhole<kValues, kGroup, kSteps>(rows.bits + r * rows.row_bits,
                                         rows.data + r * rows.row_data, rows.last_load, words);
    TESSERA_UNROLL for (int i = 0; i < kSteps; ++i) {
      Simd::StoreWords(to, words[i]);
      to += 2 * Simd::kStepChannels;
    }
  }
  return whole;
}

// Rows [first, first + count) as plain rows of `padded` words each, one behind the other.
template <ValueType kValues, int kGroup>
TESSERA_SIMD void ExpandRows(const PackedRows& rows, std::uint32_t first, std::uint32_t count,
                             int padded, std::byte* to) {
  std::uint32_t done = 0;
  if (padded == 128) {
    done = ExpandWholeRows<kValues, kGroup, 128 / Simd::kStepChannels>(rows, first, count, to);
  } else if (padded == 64) {
    done = ExpandWholeRows<kValues, kGroup, 64 / Simd::kStepChannels>(rows, first, count, to);
  }
  to += static_cast<std::size_t>(done) * padded * 2;
  for (std::uint32_t r = first + done; r < first + count; ++r) {
    auto reader = ReadRow<kValues, kGroup>(rows, r);
    for (int c = 0; c < padded; c += Simd::kStepChannels) {
      Simd::StoreWords(to, reader.Step(c));
      to += 2 * Simd::kStepChannels;
    }
  }
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
