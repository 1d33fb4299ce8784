// Attention over one part of packed tiles. Written over the including file's `Simd`. Internal
// linkage throughout: see ../README.md.
//
//   for up to 32 rows at a time, from one or several runs:
//     logits   each K row with all query rows; then weights, as over dense tiles
//     outputs  each V row, added to the outputs of all query rows
//
// A row is expanded once for all query rows. The engine defines how rows are multiplied with
// queries.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attend/attend_part-inl.h"
#include "kernels/cpu/attend/expand-inl.h"
#include "kernels/cpu/attend/gathered-inl.h"
#include "kernels/format/part.h"

namespace tessera::kernels {
namespace {

struct PackedScratch {
  alignas(64) std::byte rows[kTileRows * kMaxHeadDim * 2];  // first K, then V, of the gathered rows
  alignas(64) float key_scale[kTileRows];
  alignas(64) float value_scale[kTileRows];
  std::uint32_t visible[kMaxPartRows];
  ShortRows short_rows;
};

// The gathered rows visible to a query row, one bit each.
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

// Expands the live rows of a list, each to its index, while prefetching the rows of `ahead`.
template <ValueType kValues, int kGroup>
TESSERA_PER_PASS void ExpandListed(const AttendPart& part, const RowList& list, Span live,
                                   const RowList& ahead, std::byte* to) {
  const auto padded = static_cast<int>(part.padded_channels);
  const std::uint32_t row_data = list.row_data;
  WithSteps(list.channels, padded, [&]<int kSteps>() TESSERA_INLINE_LAMBDA {
    for (int r = live.begin; r < live.end; ++r) {
      ExpandRow<kValues, kGroup, kSteps>({list.bits[r], list.data[r], list.data[r] + row_data},
                                         row_data, list.channels, padded,
                                         to + r * static_cast<std::ptrdiff_t>(padded) * 2);
      if (r % kRowsAtOnce == 0) Request(ahead, r);
    }
  });
}

// Computes with expanded rows of type kType in fp32, as over dense tiles.
template <ElementType kType>
struct FloatEngine {
  // Queries are fp32 in channel order.
  TESSERA_PER_PASS void LoadQueries(const PartContext& context) {
    const AttendPart& part = *context.part;
    const std::uint32_t channels = part.padded_channels;
    for (std::uint32_t r = 0; r < part.row_count; ++r) {
      const auto* from = reinterpret_cast<const float*>(part.rows[r].query);
      float* to = context.scratch->queries + r * channels;
      OrderLikePairs(from, static_cast<int>(channels), to);
    }
  }
  // Reorders channels to the order in which LoadPair loads a row of kType.
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
  TESSERA_SIMD void DotKeys(const PartContext& context, const RowList& keys, Span live,
                            const RowList& ahead, std::byte* plain) {
    ExpandListed<kValues, kGroup>(*context.part, keys, live, ahead, plain);
    DotPlain(context, plain, live);
  }
  TESSERA_PER_PASS void DotPlain(const PartContext& context, const std::byte* keys, Span live) {
    ForEachRowGroup(context.part->row_count,
                    [&]<int kRows>(std::uint32_t row)
                        TESSERA_INLINE_LAMBDA { Dot<kRows>(context, keys, live, row); });
  }
  template <int kRows>
  TESSERA_SIMD void Dot(const PartContext& context, const std::byte* keys, Span live,
                        std::uint32_t first) {
    const AttendPart& part = *context.part;
    const TileView tile = {.keys = keys,
                           .values = nullptr,
                           .row_bytes = part.padded_channels * 2,
                           .head_dim = static_cast<int>(part.padded_channels)};
    DotTile<kType, kRows>(tile, live, kNoneUpcoming,
                          context.scratch->queries + first * part.padded_channels,
                          context.scratch->weights + first);
  }
  TESSERA_SIMD void RoundWeights(const PartContext&, std::uint32_t) {}
  template <ValueType kValues, int kGroup>
  TESSERA_SIMD void AddValues(const PartContext& context, const RowList& values, Span live,
                              const RowList& ahead, std::byte* plain) {
    ExpandListed<kValues, kGroup>(*context.part, values, live, ahead, plain);
    AddPlain(context, plain, live);
  }
  TESSERA_PER_PASS void AddPlain(const PartContext& context, const std::byte* values, Span live) {
    ForEachRowGroup(context.part->row_count,
                    [&]<int kRows>(std::uint32_t row)
                        TESSERA_INLINE_LAMBDA { Add<kRows>(context, values, live, row); });
  }
  template <int kRows>
  TESSERA_SIMD void Add(const PartContext& context, const std::byte* values, Span live,
                        std::uint32_t first) {
    const AttendPart& part = *context.part;
    const TileView tile = {.keys = nullptr,
                           .values = values,
                           .row_bytes = part.padded_channels * 2,
                           .head_dim = static_cast<int>(part.padded_channels)};
    kernels::AddValues<kType, kRows>(tile, live, kNoneUpcoming, context.scratch->weights + first,
                                     context.partial->output + first * part.padded_channels);
  }
  TESSERA_SIMD void Finish(const PartContext& context) { FinishOutputs<kType>(context); }
};

// The positions visible to every query row.
struct CommonRange {
  std::uint64_t begin;
  std::uint64_t end;
};

TESSERA_SIMD CommonRange CommonRangeOf(const AttendPart& part) {
  CommonRange common = {0, ~std::uint64_t{0}};
  for (std::uint32_t r = 0; r < part.row_count; ++r) {
    const QueryRow& row = part.rows[r];
    common.begin = row.visible_begin > common.begin ? row.visible_begin : common.begin;
    common.end = Least(row.visible_end, common.end);
  }
  return common;
}

// Whether every query row sees every gathered row. This common case is checked once, not per row.
TESSERA_SIMD bool SeenByAll(const AttendPart& part, const Gathered& gathered,
                            const CommonRange& common) {
  if (part.shape.positions) return false;
  bool seen = true;
  for (std::uint32_t i = 0; i < gathered.count; ++i) {
    const RowRun& run = *gathered.pieces[i].run;
    seen = seen && run.position >= common.begin && run.position + run.row_count <= common.end;
  }
  return seen;
}

// Fills the gathered rows visible to each query row; returns those visible to any.
TESSERA_PER_PASS std::uint32_t FindVisible(const AttendPart& part, const Gathered& gathered,
                                           const CommonRange& common, PackedScratch& packed) {
  if (SeenByAll(part, gathered, common)) {
    const std::uint32_t every = RowBits(0, static_cast<int>(gathered.rows));
    for (std::uint32_t r = 0; r < part.row_count; ++r) packed.visible[r] = every;
    return every;
  }
  std::uint32_t any = 0;
  for (std::uint32_t r = 0; r < part.row_count; ++r) {
    packed.visible[r] = VisibleRowsOf(part, gathered, part.rows[r]);
    any |= packed.visible[r];
  }
  return any;
}

// Turns the logits of every query row into weights.
template <class Engine>
TESSERA_PER_PASS void WeighGathered(const PartContext& context, const RowFactors& factors,
                                    const PackedScratch& packed) {
  const AttendPart& part = *context.part;
  const auto channels = static_cast<int>(part.padded_channels);
  Scratch& scratch = *context.scratch;
  for (std::uint32_t r = 0; r < part.row_count; ++r) {
    WeighRow(context.logits, factors, packed.visible[r], channels, scratch.weights[r],
             context.partial->max + r, scratch.sums[r],
             context.partial->output + r * part.padded_channels);
    Engine::RoundWeights(context, r);
  }
}

// Reads the scales and log-weights of the gathered rows.
template <bool kScaled>
TESSERA_PER_PASS RowFactors ReadFactors(const PartContext& context, const Gathered& gathered,
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

// Rows are prefetched this many passes ahead: memory latency is one to two passes.
constexpr std::uint32_t kPassesAhead = 2;

template <class Engine, ValueType kValues, int kGroup>
static void AttendPacked(const PartContext& context) {
  const AttendPart& part = *context.part;
  PackedScratch packed;
  for (int i = 0; i < kTileRows; ++i) packed.key_scale[i] = packed.value_scale[i] = 0;
  Begin(context);
  Engine::LoadQueries(context);
  TouchShortRuns(part);
  const CommonRange common = CommonRangeOf(part);
  Cursor cursor;
  Gathered passes[kPassesAhead + 1];
  for (std::uint32_t i = 0; i < kPassesAhead; ++i) Gather(part, cursor, passes[i]);
  for (std::uint32_t at = 0; passes[at].rows != 0; at = at == kPassesAhead ? 0 : at + 1) {
    Gathered& now = passes[at];
    Gathered& last = passes[at == 0 ? kPassesAhead : at - 1];
    Gather(part, cursor, last);
    const Gathered& ahead = last.rows != 0 ? last : now;  // `now` is cached already
    const RowFactors factors = ReadFactors<kValueBytes<kValues> == 1>(context, now, packed);
    const std::uint32_t any = FindVisible(part, now, common, packed);
    if (any == 0) continue;
    const Span live = SpanOf(any);
    Engine::template DotKeys<kValues, kGroup>(context, now.keys, live, ahead.keys, packed.rows);
    WeighGathered<Engine>(context, factors, packed);
    CopyShortRows(part.layout, part.padded_channels * kValueBytes<kValues>, now, packed.short_rows);
    Engine::template AddValues<kValues, kGroup>(context, now.values, live, ahead.values,
                                                packed.rows);
  }
  FinishSums(context);
  Engine::Finish(context);
}

}  // namespace
}  // namespace tessera::kernels
