// One part of dense attention, written once over the vocabulary `Simd` that the including file has
// chosen. Internal linkage throughout: see README.md.
//
//   for each tile, for each group of up to kRowGroup query rows:
//     logits   4 tile rows x the group's query rows in registers, summed by transposing
//     weights  2^(x - max), and when the maximum moves, a rescaling of what was accumulated
//     outputs  weights x V, kept in registers over the whole tile
//
// Every query row is computed by the same sequence of roundings whatever shares its group, its
// part or its batch: the bits of a result depend on the row and the lane alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/inline-inl.h"
#include "kernels/format/part.h"

namespace tessera::kernels {
namespace {

constexpr int kTileRows = 32;
constexpr int kRowsAtOnce = 4;  // tile rows whose dot products share one pass over the channels
constexpr int kPairChannels = 2 * Simd::kLanes;
constexpr int kMaxHeadDim = 256;
constexpr float kLog2E = 1.44269504f;
constexpr float kInfinity = __builtin_inff();
constexpr float kLargest = 3.40282347e+38f;

struct Span {
  int begin;
  int end;
};

struct Scratch {
  alignas(64) float queries[kMaxPartRows * kMaxHeadDim];  // as LoadPair orders them
  alignas(64) float sums[kMaxPartRows][Simd::kLanes];     // one running sum per lane
  alignas(64) float weights[Simd::kRowGroup][kTileRows];  // logits first, then weights
};

// The part's constants in the units that the inner loops want.
struct Logits {
  float multiplier;  // to log2 units, or to multiples of the cap
  float cap_log2;    // 0: no soft-cap
};

struct TileView {
  const std::byte* keys;
  const std::byte* values;
  std::size_t row_bytes;
  int head_dim;
};

template <ElementType kType>
constexpr int kElementBytes = kType == ElementType::kFp32 ? 4 : 2;

TESSERA_SIMD std::uint64_t Least(std::uint64_t a, std::uint64_t b) { return a < b ? a : b; }

// The rows of the tile that `row` may see.
TESSERA_SIMD Span VisibleRows(const RowRun& run, const QueryRow& row) {
  const auto count = static_cast<std::uint64_t>(run.row_count);
  const std::uint64_t begin =
      row.visible_begin > run.position ? Least(row.visible_begin - run.position, count) : 0;
  const std::uint64_t end =
      row.visible_end > run.position ? Least(row.visible_end - run.position, count) : 0;
  return {static_cast<int>(run.row_begin + begin), static_cast<int>(run.row_begin + end)};
}

// The tiles that come next (null at the end of a part), or one half of them.
struct Upcoming {
  const std::byte* first;
  const std::byte* second;

  TESSERA_MEMBER Upcoming From(std::size_t offset) const {
    return {first == nullptr ? nullptr : first + offset,
            second == nullptr ? nullptr : second + offset};
  }
};

// Prefetches bytes [begin, begin + bytes) of the next tile into L2, line by line. Of the tile
// after that only the head of each page: enough to walk the page tables and to start the
// hardware's stream prefetcher, which alone has enough requests in flight to saturate DRAM.
// README.md has the measurements.
//
// Callers ask in small doses, each behind the loads of the step it belongs to: a core has few
// requests for lines outstanding, and the loads of the current tile need some of them.
TESSERA_SIMD void Prefetch(const Upcoming& upcoming, std::size_t begin, std::size_t bytes) {
  constexpr std::size_t kLine = 64;
  constexpr std::size_t kPage = 4096;
  constexpr std::size_t kPageHead = 4 * kLine;
  constexpr int kRead = 0;
  constexpr int kIntoL2 = 2;
  if (upcoming.first != nullptr) {
    for (std::size_t at = begin; at < begin + bytes; at += kLine) {
      __builtin_prefetch(upcoming.first + at, kRead, kIntoL2);
    }
  }
  if (upcoming.second != nullptr) {
    for (std::size_t page = (begin + kPage - 1) / kPage * kPage; page < begin + bytes;
         page += kPage) {
      for (std::size_t at = page; at < page + kPageHead; at += kLine) {
        __builtin_prefetch(upcoming.second + at, kRead, kIntoL2);
      }
    }
  }
}

// The dot products of tile rows [first, first + 4) with kRows query rows, one block sum per row.
// Rows outside `live` are never loaded: the nearest live one stands in and is masked out later.
template <ElementType kType, int kRows>
TESSERA_SIMD void DotBlocks(const TileView& tile, Span live, int first, const float* queries,
                            typename Simd::Floats (&blocks)[kRows]) {
  const std::byte* key[kRowsAtOnce];
  TESSERA_UNROLL for (int r = 0; r < kRowsAtOnce; ++r) {
    int row = first + r;
    row = row < live.begin ? live.begin : row;
    row = row >= live.end ? live.end - 1 : row;
    key[r] = tile.keys + static_cast<std::size_t>(row) * tile.row_bytes;
  }
  typename Simd::Floats dot[kRows][kRowsAtOnce];
  TESSERA_UNROLL for (int n = 0; n < kRows; ++n) {
    TESSERA_UNROLL for (int r = 0; r < kRowsAtOnce; ++r) dot[n][r] = Simd::Zero();
  }
  for (int c = 0; c < tile.head_dim; c += kPairChannels) {
    TESSERA_UNROLL for (int r = 0; r < kRowsAtOnce; ++r) {
      const auto pair = Simd::template LoadPair<kType>(key[r] + c * kElementBytes<kType>);
      TESSERA_UNROLL for (int n = 0; n < kRows; ++n) {
        const float* query = queries + n * tile.head_dim + c;
        dot[n][r] = Simd::MultiplyAdd(pair.a, Simd::Load(query), dot[n][r]);
        dot[n][r] = Simd::MultiplyAdd(pair.b, Simd::Load(query + Simd::kLanes), dot[n][r]);
      }
    }
  }
  TESSERA_UNROLL for (int n = 0; n < kRows; ++n) {
    blocks[n] = Simd::SumBlocks(dot[n][0], dot[n][1], dot[n][2], dot[n][3]);
  }
}

// Fills weights[n][...] with q.k for the rows of `live`; what it writes elsewhere has no meaning.
template <ElementType kType, int kRows>
TESSERA_SIMD void DotTile(const TileView& tile, Span live, const Upcoming& keys,
                          const float* queries, float (*weights)[kTileRows]) {
  constexpr int kBlocks = Simd::kLanes / kRowsAtOnce;
  for (int base = 0; base < kTileRows; base += Simd::kLanes) {
    typename Simd::Floats blocks[kRows][kBlocks];
    TESSERA_UNROLL for (int b = 0; b < kBlocks; ++b) {
      const int first = base + b * kRowsAtOnce;
      typename Simd::Floats block[kRows];
      if (first < live.end && first + kRowsAtOnce > live.begin) {
        DotBlocks<kType, kRows>(tile, live, first, queries, block);
      } else {
        TESSERA_UNROLL for (int n = 0; n < kRows; ++n) block[n] = Simd::Zero();
      }
      Prefetch(keys, static_cast<std::size_t>(first) * tile.row_bytes,
               kRowsAtOnce * tile.row_bytes);
      TESSERA_UNROLL for (int n = 0; n < kRows; ++n) blocks[n][b] = block[n];
    }
    TESSERA_UNROLL for (int n = 0; n < kRows; ++n) {
      Simd::Store(weights[n] + base, Simd::SumAcross(blocks[n]));
    }
  }
}

// From a dot product to x, the logit in units of log2, saturated to the finite range.
TESSERA_SIMD typename Simd::Floats ToLog2(typename Simd::Floats dot, const Logits& logits) {
  typename Simd::Floats x = Simd::Multiply(dot, Simd::Splat(logits.multiplier));
  if (logits.cap_log2 != 0) {  // tanh |y| = (1 - t) / (1 + t), t = e^(-2 |y|)
    const auto one = Simd::Splat(1.0f);
    const auto t = Simd::Exp2(Simd::Multiply(Simd::Absolute(x), Simd::Splat(-2 * kLog2E)));
    const auto tanh = Simd::Divide(Simd::Subtract(one, t), Simd::Add(one, t));
    x = Simd::Multiply(Simd::WithSignOf(tanh, x), Simd::Splat(logits.cap_log2));
  }
  return Simd::Max(Simd::Splat(-kLargest), Simd::Min(Simd::Splat(kLargest), x));
}

TESSERA_SIMD void Rescale(typename Simd::Floats factor, int head_dim, float* output, float* sums) {
  Simd::Store(sums, Simd::Multiply(Simd::Load(sums), factor));
  for (int c = 0; c < head_dim; c += Simd::kLanes) {
    Simd::Store(output + c, Simd::Multiply(Simd::Load(output + c), factor));
  }
}

// Turns one row's dot products into weights, moving the row's maximum where it must.
TESSERA_SIMD void WeighRow(const Logits& logits, Span visible, int head_dim, float* weights,
                           float* max, float* sums, float* output) {
  constexpr int kVectors = kTileRows / Simd::kLanes;
  typename Simd::Floats x[kVectors];
  typename Simd::Floats peak = Simd::Splat(-kInfinity);
  TESSERA_UNROLL for (int i = 0; i < kVectors; ++i) {
    const int first = i * Simd::kLanes;
    x[i] = Simd::Visible(ToLog2(Simd::Load(weights + first), logits), first, visible.begin,
                         visible.end);
    peak = Simd::Max(peak, x[i]);
  }
  const float tile_max = Simd::MaxLane(peak);
  if (tile_max > *max) {
    Rescale(Simd::Exp2(Simd::Splat(*max - tile_max)), head_dim, output, sums);
    *max = tile_max;
  }
  const auto base = Simd::Splat(*max == -kInfinity ? 0.0f : *max);  // never -inf - -inf
  auto sum = Simd::Load(sums);
  TESSERA_UNROLL for (int i = 0; i < kVectors; ++i) {
    const auto weight = Simd::Exp2(Simd::Subtract(x[i], base));
    sum = Simd::Add(sum, weight);
    Simd::Store(weights + i * Simd::kLanes, weight);
  }
  Simd::Store(sums, sum);
}

// output[n] += weights[n] x V over the rows of `live`, one block of channels.
template <ElementType kType, int kRows, int kPairs>
TESSERA_SIMD void AddValueBlock(const TileView& tile, Span live, int c,
                                const float (*weights)[kTileRows], float* output) {
  typename Simd::Floats sum[kRows][2 * kPairs];
  TESSERA_UNROLL for (int n = 0; n < kRows; ++n) {
    TESSERA_UNROLL for (int i = 0; i < 2 * kPairs; ++i) {
      sum[n][i] = Simd::Load(output + n * tile.head_dim + c + i * Simd::kLanes);
    }
  }
  const std::byte* values = tile.values + static_cast<std::size_t>(live.begin) * tile.row_bytes +
                            c * kElementBytes<kType>;
  for (int r = live.begin; r < live.end; ++r, values += tile.row_bytes) {
    TESSERA_UNROLL for (int p = 0; p < kPairs; ++p) {
      const auto pair =
          Simd::template LoadPair<kType>(values + p * kPairChannels * kElementBytes<kType>);
      TESSERA_UNROLL for (int n = 0; n < kRows; ++n) {
        const auto weight = Simd::Splat(weights[n][r]);
        sum[n][2 * p] = Simd::MultiplyAdd(weight, pair.a, sum[n][2 * p]);
        sum[n][2 * p + 1] = Simd::MultiplyAdd(weight, pair.b, sum[n][2 * p + 1]);
      }
    }
  }
  TESSERA_UNROLL for (int n = 0; n < kRows; ++n) {
    TESSERA_UNROLL for (int i = 0; i < 2 * kPairs; ++i) {
      Simd::Store(output + n * tile.head_dim + c + i * Simd::kLanes, sum[n][i]);
    }
  }
}

// output[n] += weights[n] x V over the rows of `live`, a few rows at a time, so that V is read in
// almost the order of its addresses.
template <ElementType kType, int kRows>
TESSERA_SIMD void AddValues(const TileView& tile, Span live, const Upcoming& values,
                            const float (*weights)[kTileRows], float* output) {
  constexpr int kPairs = 2;
  constexpr int kChunk = 8;
  constexpr std::size_t kBlockBytes = kChunk * kPairs * kPairChannels * kElementBytes<kType>;
  for (int first = 0; first < kTileRows; first += kChunk) {
    const Span chunk = {first > live.begin ? first : live.begin,
                        first + kChunk < live.end ? first + kChunk : live.end};
    std::size_t ahead = static_cast<std::size_t>(first) * tile.row_bytes;
    for (int c = 0; c < tile.head_dim; c += kPairs * kPairChannels) {
      if (chunk.begin < chunk.end) {
        AddValueBlock<kType, kRows, kPairs>(tile, chunk, c, weights, output);
      }
      Prefetch(values, ahead, kBlockBytes);
      ahead += kBlockBytes;
    }
  }
}

struct PartContext {
  const AttendPart* part;
  const PartialRows* partial;
  Scratch* scratch;
  Logits logits;
};

// One tile for query rows [first, first + kRows).
template <ElementType kType, int kRows>
static void AttendTile(const PartContext& context, const RowRun& run, const Upcoming& upcoming,
                       std::uint32_t first) {
  const AttendPart& part = *context.part;
  const int head_dim = static_cast<int>(part.padded_channels);
  const std::size_t row_bytes = part.padded_channels * kElementBytes<kType>;
  Span visible[kRows];
  Span live = {kTileRows, 0};
  for (int n = 0; n < kRows; ++n) {
    visible[n] = VisibleRows(run, part.rows[first + n]);
    if (visible[n].begin >= visible[n].end) continue;
    live.begin = visible[n].begin < live.begin ? visible[n].begin : live.begin;
    live.end = visible[n].end > live.end ? visible[n].end : live.end;
  }
  if (live.begin >= live.end) return;

  const TileView tile = {.keys = run.tile,
                         .values = run.tile + kTileRows * row_bytes,
                         .row_bytes = row_bytes,
                         .head_dim = head_dim};
  Scratch& scratch = *context.scratch;
  float* output = context.partial->output + first * part.padded_channels;
  DotTile<kType, kRows>(tile, live, upcoming, scratch.queries + first * part.padded_channels,
                        scratch.weights);
  for (int n = 0; n < kRows; ++n) {
    WeighRow(context.logits, visible[n], head_dim, scratch.weights[n],
             context.partial->max + first + n, scratch.sums[first + n], output + n * head_dim);
  }
  AddValues<kType, kRows>(tile, live, upcoming.From(kTileRows * row_bytes), scratch.weights,
                          output);
}

template <ElementType kType>
static void Begin(const PartContext& context) {
  const AttendPart& part = *context.part;
  for (std::uint32_t r = 0; r < part.row_count; ++r) {
    context.partial->max[r] = -kInfinity;
    Simd::Store(context.scratch->sums[r], Simd::Zero());
    float* query = context.scratch->queries + r * part.padded_channels;
    float* output = context.partial->output + r * part.padded_channels;
    for (std::uint32_t c = 0; c < part.padded_channels; c += kPairChannels) {
      const auto pair =
          Simd::template LoadPair<kType>(part.rows[r].query + c * kElementBytes<kType>);
      Simd::Store(query + c, pair.a);
      Simd::Store(query + c + Simd::kLanes, pair.b);
      Simd::Store(output + c, Simd::Zero());
      Simd::Store(output + c + Simd::kLanes, Simd::Zero());
    }
  }
}

template <ElementType kType>
static void Finish(const PartContext& context) {
  const AttendPart& part = *context.part;
  for (std::uint32_t r = 0; r < part.row_count; ++r) {
    float sum = 0;
    for (int lane = 0; lane < Simd::kLanes; ++lane) sum += context.scratch->sums[r][lane];
    context.partial->sum[r] = sum;
    float* output = context.partial->output + r * part.padded_channels;
    for (std::uint32_t c = 0; c < part.padded_channels; c += kPairChannels) {
      const auto pair = Simd::template InOrder<kType>(
          {Simd::Load(output + c), Simd::Load(output + c + Simd::kLanes)});
      Simd::Store(output + c, pair.a);
      Simd::Store(output + c + Simd::kLanes, pair.b);
    }
  }
}

TESSERA_SIMD const std::byte* TileOf(const AttendPart& part, std::uint32_t run) {
  return run < part.run_count ? part.runs[run].tile : nullptr;
}

template <ElementType kType>
static void AttendRuns(const PartContext& context) {
  const AttendPart& part = *context.part;
  Begin<kType>(context);
  for (std::uint32_t i = 0; i < part.run_count; ++i) {
    Upcoming upcoming = {TileOf(part, i + 1), TileOf(part, i + 2)};
    for (std::uint32_t row = 0; row < part.row_count;) {
      const std::uint32_t left = part.row_count - row;
      if (Simd::kRowGroup >= 4 && left >= 4) {
        AttendTile<kType, Simd::kRowGroup>(context, part.runs[i], upcoming, row);
        row += 4;
      } else if (left >= 2) {
        AttendTile<kType, 2>(context, part.runs[i], upcoming, row);
        row += 2;
      } else {
        AttendTile<kType, 1>(context, part.runs[i], upcoming, row);
        row += 1;
      }
      upcoming = {};  // once per tile is enough
    }
  }
  Finish<kType>(context);
}

static void AttendPartSimd(const AttendPart& part, const PartialRows& partial) {
  Scratch scratch;
  const bool capped = part.logit_softcap != 0;
  const PartContext context = {
      .part = &part,
      .partial = &partial,
      .scratch = &scratch,
      .logits = {.multiplier = capped ? part.scale / part.logit_softcap : part.scale * kLog2E,
                 .cap_log2 = capped ? part.logit_softcap * kLog2E : 0.0f}};
  switch (static_cast<ElementType>(part.shape.format)) {
    case ElementType::kBf16:
      return AttendRuns<ElementType::kBf16>(context);
    case ElementType::kFp16:
      return AttendRuns<ElementType::kFp16>(context);
    case ElementType::kFp32:
      return AttendRuns<ElementType::kFp32>(context);
  }
}

}  // namespace
}  // namespace tessera::kernels
