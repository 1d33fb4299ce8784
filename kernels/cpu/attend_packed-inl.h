// One part of attention over packed tiles, over the vocabulary `Simd` that the including file has
// chosen. Internal linkage throughout: see README.md.
//
//   until the runs are used up:
//     gather   up to 32 rows of one or several runs: K expanded into a plain tile in L1
//     logits   and weights of all query rows, as over dense tiles
//     expand   V of the same rows
//     outputs  of all query rows
//
// So a row is expanded once for all query rows, and short runs (selected blocks) fill whole tiles.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attend_part-inl.h"
#include "kernels/cpu/expand-inl.h"
#include "kernels/format/part.h"

namespace tessera::kernels {
namespace {

// Rows of a run that stand together in the gathered tile.
struct Piece {
  const RowRun* run;
  std::uint32_t first;  // tile row
  std::uint32_t count;
  std::uint32_t at;  // row of the gathered tile
};

struct Gathered {
  Piece pieces[kTileRows];
  std::uint32_t count = 0;
  std::uint32_t rows = 0;
};

// Where in the part's runs the next row is.
struct Cursor {
  std::uint32_t run = 0;
  std::uint32_t row = 0;  // of the run
};

TESSERA_SIMD Gathered Gather(const AttendPart& part, Cursor& cursor) {
  Gathered gathered;
  while (gathered.rows < kTileRows && cursor.run < part.run_count) {
    const RowRun& run = part.runs[cursor.run];
    const std::uint32_t left = run.row_count - cursor.row;
    const std::uint32_t room = kTileRows - gathered.rows;
    const std::uint32_t count = left < room ? left : room;
    gathered.pieces[gathered.count++] = {
        .run = &run, .first = run.row_begin + cursor.row, .count = count, .at = gathered.rows};
    gathered.rows += count;
    cursor.row += count;
    if (cursor.row == run.row_count) cursor = {.run = cursor.run + 1, .row = 0};
  }
  return gathered;
}

struct PackedScratch {
  alignas(64) std::byte rows[kTileRows * kMaxHeadDim * 2];  // K, then V, of the gathered tile
  alignas(64) float key_scale[kTileRows];
  alignas(64) float value_scale[kTileRows];
  std::uint32_t visible[kMaxPartRows];
};

// The gathered rows that a query row may see.
TESSERA_SIMD std::uint32_t VisibleRowsOf(const AttendPart& part, const Gathered& gathered,
                                         const QueryRow& row) {
  std::uint32_t bits = 0;
  for (std::uint32_t i = 0; i < gathered.count; ++i) {
    const Piece& piece = gathered.pieces[i];
    const std::uint32_t of_piece = VisibleBits(part, *piece.run, row) >> piece.first &
                                   RowBits(0, static_cast<int>(piece.count));
    bits |= of_piece << piece.at;
  }
  return bits;
}

// What stands a tile's worth of rows behind the piece: the rows of a later run.
TESSERA_SIMD Ahead AheadOf(const AttendPart& part, const Piece& piece, bool values) {
  const auto index = static_cast<std::uint32_t>(piece.run - part.runs);
  const std::uint32_t later = index + (kTileRows + piece.run->row_count - 1) / piece.run->row_count;
  if (later >= part.run_count) return {nullptr, nullptr};
  const RowRun& run = part.runs[later];
  const TileLayout& layout = part.layout;
  const std::uint32_t row = run.row_begin + (piece.first - piece.run->row_begin);
  const std::byte* data =
      run.tile + (values ? layout.value_data : layout.key_data) + row * layout.row_data;
  // Short runs are not where the hardware would expect them: waiting for each costs more than it
  // brings.
  if (piece.count == kTileRows) Touch(data);
  return {run.tile + (values ? layout.value_bits : layout.key_bits) + row * layout.row_bits, data};
}

// How plain rows of type kType are computed with: in fp32, as over dense tiles.
template <ElementType kType>
struct FloatEngine {
  // Queries come in fp32 in channel order.
  TESSERA_SIMD void LoadQueries(const PartContext& context) {
    const AttendPart& part = *context.part;
    const std::uint32_t channels = part.padded_channels;
    for (std::uint32_t r = 0; r < part.row_count; ++r) {
      const auto* from = reinterpret_cast<const float*>(part.rows[r].query);
      float* to = context.scratch->queries + r * channels;
      OrderLikePairs(from, static_cast<int>(channels), to);
    }
  }
  // The order in which LoadPair gives the channels of a row of kType.
  TESSERA_SIMD void OrderLikePairs(const float* from, int channels, float* to) {
    for (int c = 0; c < channels; c += kPairChannels) {
      for (int i = 0; i < Simd::kLanes; ++i) {
        to[c + i] = from[c + (kType == ElementType::kBf16 ? 2 * i : i)];
        to[c + Simd::kLanes + i] =
            from[c + (kType == ElementType::kBf16 ? 2 * i + 1 : Simd::kLanes + i)];
      }
    }
  }

  template <ValueType kValues, int kGroup>
  TESSERA_SIMD void ExpandKeys(const PackedRows& rows, const Piece& piece, const Ahead& ahead,
                               int padded, std::byte* to) {
    ExpandRows<kValues, kGroup>(rows, piece.first, piece.count, padded, ahead,
                                to + piece.at * static_cast<std::size_t>(padded) * 2);
  }
  template <int kRows>
  TESSERA_SIMD void Dot(const PartContext& context, const std::byte* keys, Span live,
                        std::uint32_t first) {
    const AttendPart& part = *context.part;
    const TileView tile = {.keys = keys,
                           .values = nullptr,
                           .row_bytes = part.padded_channels * 2,
                           .head_dim = static_cast<int>(part.padded_channels)};
    DotTile<kType, kRows>(tile, live, {nullptr, nullptr},
                          context.scratch->queries + first * part.padded_channels,
                          context.scratch->weights + first);
  }
  template <ValueType kValues, int kGroup>
  TESSERA_SIMD void ExpandValues(const AttendPart& part, const Gathered& gathered, int padded,
                                 std::byte* to) {
    for (std::uint32_t i = 0; i < gathered.count; ++i) {
      const Piece& piece = gathered.pieces[i];
      ExpandKeys<kValues, kGroup>(ValuesOfTile(part.shape, part.layout, piece.run->tile), piece,
                                  AheadOf(part, piece, /*values=*/true), padded, to);
    }
  }
  TESSERA_SIMD void RoundWeights(const PartContext&, std::uint32_t) {}
  template <int kRows>
  TESSERA_SIMD void Add(const PartContext& context, const std::byte* values, Span live,
                        std::uint32_t first) {
    const AttendPart& part = *context.part;
    const TileView tile = {.keys = nullptr,
                           .values = values,
                           .row_bytes = part.padded_channels * 2,
                           .head_dim = static_cast<int>(part.padded_channels)};
    AddValues<kType, kRows>(tile, live, {nullptr, nullptr}, context.scratch->weights + first,
                            context.partial->output + first * part.padded_channels);
  }
  TESSERA_SIMD void Finish(const PartContext& context) { FinishOutputs<kType>(context); }
};

// Logits and weights of every query row over the gathered keys.
template <class Engine>
TESSERA_SIMD std::uint32_t WeighGathered(const PartContext& context, const Gathered& gathered,
                                         const RowFactors& factors, PackedScratch& packed) {
  const AttendPart& part = *context.part;
  const auto channels = static_cast<int>(part.padded_channels);
  Scratch& scratch = *context.scratch;
  std::uint32_t any = 0;
  for (std::uint32_t r = 0; r < part.row_count; ++r) {
    packed.visible[r] = VisibleRowsOf(part, gathered, part.rows[r]);
    any |= packed.visible[r];
  }
  if (any == 0) return 0;
  const Span live = SpanOf(any);
  ForEachRowGroup(part.row_count, [&]<int kRows>(std::uint32_t row) TESSERA_INLINE_LAMBDA {
    Engine::template Dot<kRows>(context, packed.rows, live, row);
  });
  for (std::uint32_t r = 0; r < part.row_count; ++r) {
    WeighRow(context.logits, factors, packed.visible[r], channels, scratch.weights[r],
             context.partial->max + r, scratch.sums[r],
             context.partial->output + r * part.padded_channels);
    Engine::RoundWeights(context, r);
  }
  return any;
}

// Scales and log-weights of the gathered rows.
template <bool kScaled>
TESSERA_SIMD RowFactors ReadFactors(const PartContext& context, const Gathered& gathered,
                                    PackedScratch& packed) {
  const AttendPart& part = *context.part;
  for (std::uint32_t i = 0; i < gathered.count; ++i) {
    const Piece& piece = gathered.pieces[i];
    const std::byte* tile = piece.run->tile;
    if constexpr (kScaled) {
      ReadScales(KeysOf(part.shape, part.layout, tile), piece.first, piece.count,
                 packed.key_scale + piece.at);
      ReadScales(ValuesOfTile(part.shape, part.layout, tile), piece.first, piece.count,
                 packed.value_scale + piece.at);
    }
    if (part.shape.weights) {
      ReadBias(part, tile, piece.first, piece.count, context.scratch->bias + piece.at);
    }
  }
  return {kScaled ? packed.key_scale : nullptr, kScaled ? packed.value_scale : nullptr,
          part.shape.weights ? context.scratch->bias : nullptr};
}

template <class Engine, ValueType kValues, int kGroup>
static void AttendPacked(const PartContext& context) {
  const AttendPart& part = *context.part;
  const auto padded = static_cast<int>(part.padded_channels);
  PackedScratch packed;
  for (int i = 0; i < kTileRows; ++i) packed.key_scale[i] = packed.value_scale[i] = 0;
  Begin(context);
  Engine::LoadQueries(context);
  Cursor cursor;
  while (cursor.run < part.run_count) {
    const Gathered gathered = Gather(part, cursor);
    for (std::uint32_t i = 0; i < gathered.count; ++i) {
      const Piece& piece = gathered.pieces[i];
      Engine::template ExpandKeys<kValues, kGroup>(KeysOf(part.shape, part.layout, piece.run->tile),
                                                   piece, AheadOf(part, piece, /*values=*/false),
                                                   padded, packed.rows);
    }
    const RowFactors factors = ReadFactors<kValueBytes<kValues> == 1>(context, gathered, packed);
    const std::uint32_t any = WeighGathered<Engine>(context, gathered, factors, packed);
    if (any == 0) continue;
    Engine::template ExpandValues<kValues, kGroup>(part, gathered, padded, packed.rows);
    const Span live = SpanOf(any);
    ForEachRowGroup(part.row_count, [&]<int kRows>(std::uint32_t row) TESSERA_INLINE_LAMBDA {
      Engine::template Add<kRows>(context, packed.rows, live, row);
    });
  }
  FinishSums(context);
  Engine::Finish(context);
}

}  // namespace
}  // namespace tessera::kernels
