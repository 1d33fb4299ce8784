// Dot products, weights and weighted sums over the rows of one tile. Written over the including
// file's `Simd`. Internal linkage throughout: see ../README.md.
//
// Every query row goes through the same sequence of roundings, whatever shares its group, part or
// batch. The bits of a result depend on the row and the lane alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/simd/always_inline-inl.h"
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

// The part's constants in the units of the inner loops.
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

// Factors of single rows of a tile; null: none.
struct RowFactors {
  const float* key_scale;    // multiplies the dot product
  const float* value_scale;  // multiplies the weight after it has been summed
  const float* bias;         // log2 of the entry's weight
};

template <ElementType kType>
constexpr int kElementBytes = kType == ElementType::kFp32 ? 4 : 2;

TESSERA_SIMD std::uint64_t Least(std::uint64_t a, std::uint64_t b) { return a < b ? a : b; }

// Bits [begin, end) of a word, one per tile row.
TESSERA_SIMD std::uint32_t RowBits(int begin, int end) {
  if (begin >= end) return 0;
  const std::uint64_t below_end = (std::uint64_t{1} << end) - 1;
  return static_cast<std::uint32_t>(below_end & ~((std::uint64_t{1} << begin) - 1));
}

// The smallest range that contains every set bit.
TESSERA_SIMD Span SpanOf(std::uint32_t bits) {
  if (bits == 0) return {kTileRows, 0};
  return {__builtin_ctz(bits), kTileRows - __builtin_clz(bits)};
}

// The current tile and the next ones; null: already requested, or the part ends.
struct Upcoming {
  const std::byte* now;
  const std::byte* next;
  const std::byte* after;
  std::size_t row_bytes;  // bytes of all K and V rows, which come first in a tile
  Lookahead lookahead;
};
constexpr Upcoming kNoneUpcoming = {};

constexpr std::size_t kLine = 64;

// A load that nothing waits for. A prefetch of a page that is not in the TLB is late or dropped; a
// load brings the translation and starts the hardware prefetchers.
TESSERA_SIMD void Touch(const std::byte* at) {
  (void)*reinterpret_cast<const volatile unsigned char*>(at);
}

constexpr int kIntoL2 = 2;
constexpr int kIntoL1 = 3;

template <int kInto>
TESSERA_SIMD void PrefetchLines(const std::byte* from, std::size_t bytes) {
  constexpr int kRead = 0;
  for (std::size_t at = 0; at < bytes; at += kLine) __builtin_prefetch(from + at, kRead, kInto);
}

// Prefetches as many bytes as are loaded from offset `begin` of the current tile, at the distance
// that the core prefers, at most one tile ahead. If tiles are not contiguous in memory, it also
// requests the first lines of each page of the tile after the next: enough to walk the page tables
// and to start the hardware's stream prefetcher, which alone has enough requests in flight to
// saturate DRAM. ../README.md has measurements.
//
// Call it in small amounts, each after the loads of its step: a core has few outstanding line
// requests, and the loads of the current tile need some of them.
TESSERA_SIMD void Prefetch(const Upcoming& upcoming, std::size_t begin, std::size_t bytes) {
  constexpr std::size_t kPage = 4096;
  constexpr std::size_t kPageHead = 4 * kLine;
  if (upcoming.now == nullptr) return;
  const std::size_t tile = upcoming.row_bytes;
  const std::size_t ahead = begin + Least(upcoming.lookahead.bytes, tile);
  const std::byte* from = ahead < tile               ? upcoming.now + ahead
                          : upcoming.next != nullptr ? upcoming.next + (ahead - tile)
                                                     : nullptr;
  if (from != nullptr) {
    if (upcoming.lookahead.into_l1) {
      PrefetchLines<kIntoL1>(from, bytes);
    } else {
      PrefetchLines<kIntoL2>(from, bytes);
    }
  }
  const bool in_order = reinterpret_cast<std::uintptr_t>(upcoming.after) -
                            reinterpret_cast<std::uintptr_t>(upcoming.now) <
                        3 * tile;
  if (upcoming.after == nullptr || in_order) return;
  for (std::size_t page = (begin + kPage - 1) / kPage * kPage; page < begin + bytes;
       page += kPage) {
    PrefetchLines<kIntoL2>(upcoming.after + page, kPageHead);
  }
}

// The dot products of tile rows [first, first + 4) with kRows query rows, one block sum per row.
// Rows outside `live` are never loaded: the nearest live row replaces them and is masked out later.
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

// Fills weights[n][...] with q.k for the rows of `live`; other elements are undefined. `dot_blocks`
// computes the block sums of four rows; `after` is called after their loads.
template <int kRows, class Blocks, class After>
TESSERA_SIMD void DotRows(Span live, Blocks dot_blocks, After after, float (*weights)[kTileRows]) {
  constexpr int kBlocks = Simd::kLanes / kRowsAtOnce;
  for (int base = 0; base < kTileRows; base += Simd::kLanes) {
    typename Simd::Floats blocks[kRows][kBlocks];
    TESSERA_UNROLL for (int b = 0; b < kBlocks; ++b) {
      const int first = base + b * kRowsAtOnce;
      typename Simd::Floats block[kRows];
      if (first < live.end && first + kRowsAtOnce > live.begin) {
        dot_blocks(first, block);
      } else {
        TESSERA_UNROLL for (int n = 0; n < kRows; ++n) block[n] = Simd::Zero();
      }
      after(first);
      TESSERA_UNROLL for (int n = 0; n < kRows; ++n) blocks[n][b] = block[n];
    }
    TESSERA_UNROLL for (int n = 0; n < kRows; ++n) {
      Simd::Store(weights[n] + base, Simd::SumAcross(blocks[n]));
    }
  }
}

template <ElementType kType, int kRows>
TESSERA_SIMD void DotTile(const TileView& tile, Span live, const Upcoming& upcoming,
                          const float* queries, float (*weights)[kTileRows]) {
  DotRows<kRows>(
      live,
      [&](int first, typename Simd::Floats(&block)[kRows])
          TESSERA_INLINE_LAMBDA { DotBlocks<kType, kRows>(tile, live, first, queries, block); },
      [&](int first) TESSERA_INLINE_LAMBDA {
        Prefetch(upcoming, static_cast<std::size_t>(first) * tile.row_bytes,
                 kRowsAtOnce * tile.row_bytes);
      },
      weights);
}

// Converts a dot product to x, the logit in log2 units, saturated to the finite range.
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

// Turns one row's dot products into weights and updates the row's maximum. Tile rows whose bit in
// `visible` is clear get weight 0.
TESSERA_SIMD void WeighRow(const Logits& logits, const RowFactors& factors, std::uint32_t visible,
                           int head_dim, float* weights, float* max, float* sums, float* output) {
  constexpr int kVectors = kTileRows / Simd::kLanes;
  typename Simd::Floats x[kVectors];
  typename Simd::Floats peak = Simd::Splat(-kInfinity);
  TESSERA_UNROLL for (int i = 0; i < kVectors; ++i) {
    const int first = i * Simd::kLanes;
    typename Simd::Floats dot = Simd::Load(weights + first);
    if (factors.key_scale != nullptr) {
      dot = Simd::Multiply(dot, Simd::Load(factors.key_scale + first));
    }
    x[i] = ToLog2(dot, logits);
    if (factors.bias != nullptr) x[i] = Simd::Add(x[i], Simd::Load(factors.bias + first));
    x[i] = Simd::WhereBits(visible >> first, x[i], Simd::Splat(-kInfinity));
    peak = Simd::Max(peak, x[i]);
  }
  const float tile_max = Simd::MaxLane(peak);
  if (tile_max > *max) {
    Rescale(Simd::Exp2(Simd::Splat(*max - tile_max)), head_dim, output, sums);
    *max = tile_max;
  }
  const auto base = Simd::Splat(*max == -kInfinity ? 0.0f : *max);  // avoids -inf - -inf
  auto sum = Simd::Load(sums);
  TESSERA_UNROLL for (int i = 0; i < kVectors; ++i) {
    auto weight = Simd::Exp2(Simd::Subtract(x[i], base));
    sum = Simd::Add(sum, weight);
    if (factors.value_scale != nullptr) {
      weight = Simd::Multiply(weight, Simd::Load(factors.value_scale + i * Simd::kLanes));
    }
    Simd::Store(weights + i * Simd::kLanes, weight);
  }
  Simd::Store(sums, sum);
}

// output[n] += weights[n] x V over the rows of `live`, for one block of channels.
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

// output[n] += weights[n] x V over the rows of `live`. Processes a few rows at a time, so that V is
// read almost in address order.
template <ElementType kType, int kRows>
TESSERA_SIMD void AddValues(const TileView& tile, Span live, const Upcoming& upcoming,
                            const float (*weights)[kTileRows], float* output) {
  constexpr int kPairs = 2;
  constexpr int kChunk = 8;
  constexpr int kBlockChannels = kPairs * kPairChannels;
  constexpr std::size_t kBlockBytes = kChunk * kBlockChannels * kElementBytes<kType>;
  for (int first = 0; first < kTileRows; first += kChunk) {
    const Span chunk = {first > live.begin ? first : live.begin,
                        first + kChunk < live.end ? first + kChunk : live.end};
    std::size_t read = static_cast<std::size_t>(kTileRows + first) * tile.row_bytes;
    int c = 0;
    for (; c + kBlockChannels <= tile.head_dim; c += kBlockChannels) {
      if (chunk.begin < chunk.end) {
        AddValueBlock<kType, kRows, kPairs>(tile, chunk, c, weights, output);
      }
      Prefetch(upcoming, read, kBlockBytes);
      read += kBlockBytes;
    }
    for (; c < tile.head_dim; c += kPairChannels) {  // the rest, if channels are truncated
      if (chunk.begin < chunk.end) {
        AddValueBlock<kType, kRows, 1>(tile, chunk, c, weights, output);
      }
    }
  }
}

}  // namespace
}  // namespace tessera::kernels
