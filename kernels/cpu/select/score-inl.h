// Scores blocks by their summaries. Written over the including file's `Simd`. Internal linkage
// throughout: see ../README.md.
//
// The summaries of consecutive tiles are gathered into tiles of 32 rows and multiplied like keys.
// For min/max rows the bound sum_c max(q_c min_c, q_c max_c) is the dot product of [min | max] with
// [negative part of q | positive part of q].
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attend/attend_packed-inl.h"
#include "kernels/format/part.h"

namespace tessera::kernels {
namespace {

struct ScoreScratch {
  alignas(64) std::byte rows[kTileRows * 2 * kMaxHeadDim * sizeof(float)];
  RowList listed;  // row addresses, for scoring without expansion
  alignas(64) float queries[kMaxPartRows * 2 * kMaxHeadDim];
  alignas(64) float scores[kMaxPartRows][kTileRows];
  alignas(64) float scale[kTileRows];  // the row's scale times the part's scale
  alignas(64) float bias[kTileRows];   // ln of the block's largest weight
};

// The next block to score.
struct BlockCursor {
  std::uint32_t run = 0;
  std::uint32_t block = 0;
};

constexpr float kLn2 = 0.693147182f;

// ln of a block's largest weight; computes a single logarithm.
TESSERA_SIMD float LargestLogWeight(const ScorePart& part, const BlockRun& run,
                                    std::uint32_t block) {
  const std::uint32_t entries = block + 1 == run.blocks ? run.last_entries : part.shape.block;
  const std::byte* weights =
      run.tile + part.layout.weights + block * part.shape.block * sizeof(float);
  float largest = 0;
  for (std::uint32_t e = 0; e < entries; ++e) {
    float weight;
    __builtin_memcpy(&weight, weights + e * sizeof(weight), sizeof(weight));
    largest = weight > largest ? weight : largest;
  }
  alignas(64) float lanes[Simd::kLanes];
  Simd::Store(lanes, Log2<Simd>(Simd::Splat(largest)));
  return lanes[0] * kLn2;
}

// Multiplies full summary rows of type kType in fp32.
template <ElementType kType>
struct FloatScores {
  TESSERA_SIMD void LoadQuery(const float* query, int channels, std::uint32_t row,
                              ScoreScratch& scratch) {
    FloatEngine<kType>::OrderLikePairs(query, channels, scratch.queries + row * channels);
  }
  TESSERA_SIMD void Prepare(ScoreScratch&, Span) {}
  template <int kRows>
  TESSERA_SIMD void Dot(ScoreScratch& scratch, int channels, Span live, std::uint32_t row) {
    const TileView tile = {.keys = scratch.rows,
                           .values = nullptr,
                           .row_bytes = static_cast<std::size_t>(channels) * kElementBytes<kType>,
                           .head_dim = channels};
    DotTile<kType, kRows>(tile, live, kNoneUpcoming, scratch.queries + row * channels,
                          scratch.scores + row);
  }
};

#if defined(TESSERA_DOT_ENGINE)
// Multiplies by pair dot products, with the query rounded to bf16. For means, which are estimates
// anyway.
struct DotScores {
  TESSERA_SIMD std::uint16_t* QueryOf(ScoreScratch& scratch, int channels, std::uint32_t row) {
    return reinterpret_cast<std::uint16_t*>(scratch.queries) + row * channels;
  }
  TESSERA_SIMD void LoadQuery(const float* query, int channels, std::uint32_t row,
                              ScoreScratch& scratch) {
    DotEngine::RoundRow(query, channels, QueryOf(scratch, channels, row));
  }
  TESSERA_SIMD void Prepare(ScoreScratch&, Span) {}
  template <int kRows>
  TESSERA_SIMD void Dot(ScoreScratch& scratch, int channels, Span live, std::uint32_t row) {
    DotEngine::DotDense<kRows>(scratch.rows, channels, live, QueryOf(scratch, channels, row),
                               scratch.scores + row);
  }
};
using PackedBf16Scores = DotScores;

// The same for listed rows that keep few channels.
template <class Keys>
struct SparseScores {
  std::uint32_t kept;
  TESSERA_SIMD void LoadQuery(const float* query, int channels, std::uint32_t row,
                              ScoreScratch& scratch) {
    DotScores::LoadQuery(query, channels, row, scratch);
  }
  TESSERA_SIMD void Prepare(ScoreScratch& scratch, Span live) {
    RepeatLast(static_cast<std::uint32_t>(live.end), scratch.listed);
    Keys::FindChannels(scratch.listed, live, scratch.rows);
  }
  template <int kRows>
  TESSERA_MEMBER void Dot(ScoreScratch& scratch, int channels, Span live, std::uint32_t row) const {
    Keys::template Dot<kRows>(
        scratch.listed, scratch.rows, kept, DotScores::QueryOf(scratch, channels, row), live,
        [](int) {}, scratch.scores + row);
  }
};
#else
using PackedBf16Scores = FloatScores<ElementType::kBf16>;
#endif

// Copies a min/max row and pads each half.
TESSERA_SIMD void CopyHalves(const std::byte* row, std::size_t half_bytes, std::size_t padded_bytes,
                             std::byte* to) {
  for (int half = 0; half < 2; ++half) {
    __builtin_memset(to, 0, padded_bytes);
    __builtin_memcpy(to, row, half_bytes);
    row += half_bytes;
    to += padded_bytes;
  }
}

// Copies a tile's first `count` block rows, unpacked, to rows `at` and on of the scratch.
struct DenseBlocks {
  std::uint32_t element_bytes;
  std::size_t row_bytes;
  TESSERA_MEMBER void operator()(const ScorePart& part, const std::byte* summaries,
                                 std::uint32_t count, std::uint32_t at,
                                 ScoreScratch& scratch) const {
    std::byte* to = scratch.rows + at * row_bytes;
    const TileLayout& layout = part.layout;
    const std::byte* row = summaries + layout.block_data;
    const std::size_t padded = part.padded_channels * element_bytes;
    for (std::uint32_t b = 0; b < count; ++b, row += layout.block_row.data) {
      if (part.shape.summary == Summary::kMean) {
        __builtin_memcpy(to, row, padded);  // dense: no padding
        to += padded;
      } else {
        CopyHalves(row, part.shape.key.channels * element_bytes, padded, to);
        to += 2 * padded;
      }
    }
  }
};

template <ValueType kValues>
TESSERA_SIMD void ReadBlockScales(const ScorePart& part, const std::byte* summaries,
                                  std::uint32_t count, float* scale) {
  if constexpr (kValueBytes<kValues> == 1) {
    ReadScales(BlocksOfTile(part.shape, part.layout, summaries), 0, count, scale);
    for (std::uint32_t b = 0; b < count; ++b) scale[b] *= part.scale;
  }
}

template <ValueType kValues, int kGroup>
struct PackedBlocks {
  TESSERA_MEMBER void operator()(const ScorePart& part, const std::byte* summaries,
                                 std::uint32_t count, std::uint32_t at,
                                 ScoreScratch& scratch) const {
    const PackedRows rows = BlocksOfTile(part.shape, part.layout, summaries);
    const auto padded = static_cast<int>(part.padded_channels);
    ExpandRows<kValues, kGroup>(rows, 0, count, padded,
                                scratch.rows + at * static_cast<std::size_t>(padded) * 2);
    ReadBlockScales<kValues>(part, summaries, count, scratch.scale + at);
  }
};

// Lists the addresses of all block rows of a tile, whether or not all of them exist. The next
// tile's rows overwrite those that do not.
template <ValueType kValues>
struct ListedBlocks {
  int per_tile;      // 2, 4 or 8
  std::size_t bits;  // offset of the first summary's bits
  std::size_t row_bits;
  std::size_t data;
  std::size_t row_data;

  template <int kCount>
  TESSERA_MEMBER void List(const std::byte* summaries, std::uint32_t at, RowList& list) const {
    TESSERA_UNROLL for (std::size_t b = 0; b < kCount; ++b) {
      list.bits[at + b] = summaries + bits + b * row_bits;
      list.data[at + b] = summaries + data + b * row_data;
    }
  }
  TESSERA_MEMBER void operator()(const ScorePart& part, const std::byte* summaries,
                                 std::uint32_t count, std::uint32_t at,
                                 ScoreScratch& scratch) const {
    if (per_tile == 2) {
      List<2>(summaries, at, scratch.listed);
    } else if (per_tile == 4) {
      List<4>(summaries, at, scratch.listed);
    } else {
      List<8>(summaries, at, scratch.listed);
    }
    ReadBlockScales<kValues>(part, summaries, count, scratch.scale + at);
  }
};

// The location of a tile's summaries.
struct SummaryLines {
  std::size_t first;   // byte
  std::size_t behind;  // bytes after the first line
};

TESSERA_SIMD SummaryLines LinesOf(const TileShape& shape, const TileLayout& layout) {
  const std::uint32_t first = layout.block_row.bits != 0 ? layout.block_bits : layout.block_data;
  const std::uint32_t bytes =
      layout.block_data + (kTileRows / shape.block) * layout.block_row.data - first;
  return {first, bytes > kLine ? bytes - kLine : 0};
}

// Prefetches the summaries of a run. If they do not follow those of the previous run, their page
// may not have been read yet: a load of the first line brings the translation for the prefetches.
TESSERA_SIMD void RequestBlocks(const ScorePart& part, const SummaryLines& lines,
                                std::uint32_t run) {
  if (run >= part.run_count) return;
  const std::byte* at = part.runs[run].summaries + lines.first;
  const bool follows = run > 0 && part.runs[run].summaries ==
                                      part.runs[run - 1].summaries + part.layout.summary_bytes;
  if (!follows) Touch(at);
  PrefetchLines<kIntoL2>(at, lines.behind + kLine);
}

template <class Scores, class Blocks>
static void ScoreRuns(const ScorePart& part, const Scores& scores, const Blocks& blocks,
                      int channels) {
  ScoreScratch scratch;
  for (std::uint32_t r = 0; r < part.row_count; ++r) {
    const float* row = part.rows + r * part.padded_channels;
    alignas(64) float halves[2 * kMaxHeadDim];
    if (part.shape.summary == Summary::kMinMax) {
      const auto padded = static_cast<int>(part.padded_channels);
      for (int c = 0; c < padded; c += Simd::kLanes) {
        Simd::Store(halves + c, Simd::Min(Simd::Load(row + c), Simd::Zero()));
        Simd::Store(halves + padded + c, Simd::Max(Simd::Load(row + c), Simd::Zero()));
      }
      row = halves;
    }
    scores.LoadQuery(row, channels, r, scratch);
  }
  for (int i = 0; i < kTileRows; ++i) {
    scratch.scale[i] = part.scale;
    scratch.bias[i] = 0;
  }
  std::uint64_t done = 0;
  std::uint32_t at = 0;  // gathered rows
  const auto flush = [&]() {
    if (at == 0) return;
    const Span live = {0, static_cast<int>(at)};
    scores.Prepare(scratch, live);
    ForEachRowGroup(part.row_count, [&]<int kRows>(std::uint32_t row) TESSERA_INLINE_LAMBDA {
      scores.template Dot<kRows>(scratch, channels, live, row);
    });
    for (std::uint32_t r = 0; r < part.row_count; ++r) {
      for (int i = 0; i < kTileRows; i += Simd::kLanes) {
        const auto score = Simd::Load(scratch.scores[r] + i);
        Simd::Store(scratch.scores[r] + i, Simd::MultiplyAdd(score, Simd::Load(scratch.scale + i),
                                                             Simd::Load(scratch.bias + i)));
      }
      __builtin_memcpy(part.scores + r * part.score_stride + done, scratch.scores[r],
                       at * sizeof(float));
    }
    done += at;
    at = 0;
  };
  const SummaryLines lines = LinesOf(part.shape, part.layout);
  const bool weights = part.shape.weights;
  const std::uint32_t run_count = part.run_count;
  const std::uint32_t full = kTileRows - kTileRows / part.shape.block;  // above it no tile fits
  const std::uint32_t ahead = part.shape.block;                         // in runs, so 32 rows
  for (std::uint32_t i = 0; i < ahead; ++i) RequestBlocks(part, lines, i);
  for (std::uint32_t i = 0; i < run_count; ++i) {
    const BlockRun& run = part.runs[i];
    RequestBlocks(part, lines, i + ahead);
    blocks(part, run.summaries, run.blocks, at, scratch);
    if (weights) {
      for (std::uint32_t b = 0; b < run.blocks; ++b) {
        scratch.bias[at + b] = LargestLogWeight(part, run, b);
      }
    }
    at += run.blocks;
    if (at > full) flush();
  }
  flush();
}

template <ElementType kType>
TESSERA_SIMD void ScoreDense(const ScorePart& part) {
  const int halves = part.shape.summary == Summary::kMinMax ? 2 : 1;
  const int channels = halves * static_cast<int>(part.padded_channels);
  const std::size_t row_bytes = static_cast<std::size_t>(channels) * kElementBytes<kType>;
  ScoreRuns(part, FloatScores<kType>(), DenseBlocks{kElementBytes<kType>, row_bytes}, channels);
}

// Scores the means of packed keys.
template <ValueType kValues, int kGroup>
TESSERA_SIMD void ScoreMeans(const ScorePart& part) {
  const auto padded = static_cast<int>(part.padded_channels);
  if constexpr (kValues == ValueType::kFp16) {
    ScoreRuns(part, FloatScores<ElementType::kFp16>(), PackedBlocks<kValues, kGroup>(), padded);
  } else {
#if defined(TESSERA_DOT_ENGINE)
    if (WithSparseKeys(part.shape, part.padded_channels,
                       [&]<int kSteps, int kVectors>() TESSERA_INLINE_LAMBDA {
                         using Keys = SparseKeys<kValues, kGroup, kSteps, kVectors>;
                         const TileLayout& layout = part.layout;
                         const ListedBlocks<kValues> listed = {
                             .per_tile = kTileRows / part.shape.block,
                             .bits = layout.block_bits,
                             .row_bits = layout.block_row.bits,
                             .data = layout.block_data,
                             .row_data = layout.block_row.data};
                         ScoreRuns(part, SparseScores<Keys>{part.shape.key.kept}, listed, padded);
                       })) {
      return;
    }
#endif
    ScoreRuns(part, PackedBf16Scores(), PackedBlocks<kValues, kGroup>(), padded);
  }
}

static void ScorePartSimd(const ScorePart& part) {
  if (part.shape.summary == Summary::kMean && part.shape.format >= TileFormat::kPackedBf16) {
    return WithValues(part.shape,
                      [&]<ValueType kValues, int kGroup>() { ScoreMeans<kValues, kGroup>(part); });
  }
  switch (part.shape.format) {
    case TileFormat::kDenseFp16:
      return ScoreDense<ElementType::kFp16>(part);
    case TileFormat::kDenseFp32:
      return ScoreDense<ElementType::kFp32>(part);
    default:  // dense bf16, and min/max rows of packed tiles
      return ScoreDense<ElementType::kBf16>(part);
  }
}

}  // namespace
}  // namespace tessera::kernels
