// Attention over one part of dense tiles. Written over the including file's `Simd`. Internal
// linkage throughout: see ../README.md.
//
//   for each tile, for each group of up to kRowGroup query rows:
//     logits   4 tile rows x the group's query rows in registers, summed by transposing
//     weights  2^(x - max); accumulated results are rescaled when the maximum changes
//     outputs  weights x V, kept in registers over the whole tile
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attend/tile_math-inl.h"
#include "kernels/format/part.h"

namespace tessera::kernels {
namespace {

struct Scratch {
  alignas(64) float queries[kMaxPartRows * kMaxHeadDim];  // in LoadPair's order
  alignas(64) float sums[kMaxPartRows][Simd::kLanes];     // one running sum per lane
  alignas(64) float weights[kMaxPartRows][kTileRows];     // logits first, then weights
  alignas(64) float bias[kTileRows];
};

struct PartContext {
  const AttendPart* part;
  const PartialRows* partial;
  Scratch* scratch;
  Logits logits;
};

TESSERA_SIMD Logits LogitsOf(float scale, float softcap) {
  const bool capped = softcap != 0;
  return {.multiplier = capped ? scale / softcap : scale * kLog2E,
          .cap_log2 = capped ? softcap * kLog2E : 0.0f};
}

// The tile rows of the run visible to `row`, one bit each. Position words rise from row to row.
TESSERA_SIMD std::uint32_t VisibleBits(const AttendPart& part, const RowRun& run,
                                       const QueryRow& row) {
  const std::uint64_t begin =
      row.visible_begin > run.position ? row.visible_begin - run.position : 0;
  const std::uint64_t end = row.visible_end > run.position ? row.visible_end - run.position : 0;
  const auto first = static_cast<int>(run.row_begin);
  const auto count = static_cast<int>(run.row_count);
  if (!part.shape.positions) {
    const auto limit = static_cast<std::uint64_t>(count);
    return RowBits(first + static_cast<int>(Least(begin, limit)),
                   first + static_cast<int>(Least(end, limit)));
  }
  const std::byte* words = run.tile + part.layout.positions;
  const auto seen = [&](int r) TESSERA_INLINE_LAMBDA {
    std::uint32_t word;
    __builtin_memcpy(&word, words + r * sizeof(word), sizeof(word));
    return word >= begin && word < end;
  };
  if (seen(first) && seen(first + count - 1)) return RowBits(first, first + count);
  std::uint32_t bits = 0;
  for (int r = first; r < first + count; ++r) {
    bits |= static_cast<std::uint32_t>(seen(r) ? 1 : 0) << r;
  }
  return bits;
}

// Writes log2 of the weights of tile rows [first, first + count) to `bias`, in whole vectors.
TESSERA_SIMD void ReadBias(const AttendPart& part, const std::byte* tile, std::uint32_t first,
                           std::uint32_t count, float* bias) {
  alignas(64) float weights[kTileRows];
  for (int i = 0; i < kTileRows; i += Simd::kLanes) Simd::Store(weights + i, Simd::Splat(1.0f));
  __builtin_memcpy(weights, tile + part.layout.weights + first * sizeof(float),
                   count * sizeof(float));
  for (std::uint32_t i = 0; i < count; i += Simd::kLanes) {
    Simd::Store(weights + i, Log2<Simd>(Simd::Load(weights + i)));
  }
  __builtin_memcpy(bias, weights, count * sizeof(float));
}

// Processes one tile for query rows [first, first + kRows).
template <ElementType kType, int kRows>
static void AttendTile(const PartContext& context, const RowRun& run, const Upcoming& upcoming,
                       std::uint32_t first) {
  const AttendPart& part = *context.part;
  const auto head_dim = static_cast<int>(part.padded_channels);
  const std::size_t row_bytes = part.padded_channels * kElementBytes<kType>;
  std::uint32_t visible[kRows];
  std::uint32_t any = 0;
  for (int n = 0; n < kRows; ++n) {
    visible[n] = VisibleBits(part, run, part.rows[first + n]);
    any |= visible[n];
  }
  if (any == 0) return;
  const Span live = SpanOf(any);

  const TileView tile = {.keys = run.tile,
                         .values = run.tile + kTileRows * row_bytes,
                         .row_bytes = row_bytes,
                         .head_dim = head_dim};
  Scratch& scratch = *context.scratch;
  const RowFactors factors = {nullptr, nullptr, part.shape.weights ? scratch.bias : nullptr};
  float* output = context.partial->output + first * part.padded_channels;
  DotTile<kType, kRows>(tile, live, upcoming, scratch.queries + first * part.padded_channels,
                        scratch.weights);
  for (int n = 0; n < kRows; ++n) {
    WeighRow(context.logits, factors, visible[n], head_dim, scratch.weights[n],
             context.partial->max + first + n, scratch.sums[first + n], output + n * head_dim);
  }
  AddValues<kType, kRows>(tile, live, upcoming, scratch.weights, output);
}

// Initializes the partial results to the neutral element.
TESSERA_SIMD void Begin(const PartContext& context) {
  const AttendPart& part = *context.part;
  for (std::uint32_t r = 0; r < part.row_count; ++r) {
    context.partial->max[r] = -kInfinity;
    Simd::Store(context.scratch->sums[r], Simd::Zero());
    float* output = context.partial->output + r * part.padded_channels;
    for (std::uint32_t c = 0; c < part.padded_channels; c += Simd::kLanes) {
      Simd::Store(output + c, Simd::Zero());
    }
  }
}

TESSERA_SIMD void FinishSums(const PartContext& context) {
  for (std::uint32_t r = 0; r < context.part->row_count; ++r) {
    float sum = 0;
    for (int lane = 0; lane < Simd::kLanes; ++lane) sum += context.scratch->sums[r][lane];
    context.partial->sum[r] = sum;
  }
}

template <ElementType kType>
static void FinishOutputs(const PartContext& context) {
  const AttendPart& part = *context.part;
  for (std::uint32_t r = 0; r < part.row_count; ++r) {
    float* output = context.partial->output + r * part.padded_channels;
    for (std::uint32_t c = 0; c < part.padded_channels; c += kPairChannels) {
      const auto pair = Simd::template InOrder<kType>(
          {Simd::Load(output + c), Simd::Load(output + c + Simd::kLanes)});
      Simd::Store(output + c, pair.a);
      Simd::Store(output + c + Simd::kLanes, pair.b);
    }
  }
}

// Loads a row as fp32 in LoadPair's channel order.
template <ElementType kType>
TESSERA_SIMD void LoadQuery(const std::byte* row, int head_dim, float* query) {
  for (int c = 0; c < head_dim; c += kPairChannels) {
    const auto pair = Simd::template LoadPair<kType>(row + c * kElementBytes<kType>);
    Simd::Store(query + c, pair.a);
    Simd::Store(query + c + Simd::kLanes, pair.b);
  }
}

TESSERA_SIMD const std::byte* TileOf(const AttendPart& part, std::uint32_t run) {
  return run < part.run_count ? part.runs[run].tile : nullptr;
}

// Calls run.operator()<rows>(first) for groups of 4, 2 and 1 query rows.
template <class Run>
TESSERA_SIMD void ForEachRowGroup(std::uint32_t rows, Run run) {
  for (std::uint32_t row = 0; row < rows;) {
    const std::uint32_t left = rows - row;
    if (Simd::kRowGroup >= 4 && left >= 4) {
      run.template operator()<Simd::kRowGroup>(row);
      row += 4;
    } else if (left >= 2) {
      run.template operator()<2>(row);
      row += 2;
    } else {
      run.template operator()<1>(row);
      row += 1;
    }
  }
}

template <ElementType kType>
static void AttendDense(const PartContext& context) {
  const AttendPart& part = *context.part;
  Begin(context);
  for (std::uint32_t r = 0; r < part.row_count; ++r) {
    LoadQuery<kType>(part.rows[r].query, static_cast<int>(part.padded_channels),
                     context.scratch->queries + r * part.padded_channels);
  }
  for (std::uint32_t i = 0; i < part.run_count; ++i) {
    const RowRun& run = part.runs[i];
    Upcoming upcoming = {.now = run.tile,
                         .next = TileOf(part, i + 1),
                         .after = TileOf(part, i + 2),
                         .row_bytes = 2 * kTileRows * part.padded_channels * kElementBytes<kType>,
                         .lookahead = part.lookahead};
    if (part.shape.weights) {
      ReadBias(part, run.tile, run.row_begin, run.row_count, context.scratch->bias + run.row_begin);
    }
    ForEachRowGroup(part.row_count, [&]<int kRows>(std::uint32_t row) {
      AttendTile<kType, kRows>(context, run, upcoming, row);
      upcoming = {};  // request each tile only once
    });
  }
  FinishSums(context);
  FinishOutputs<kType>(context);
}

}  // namespace
}  // namespace tessera::kernels
