// What one kernel call computes: a few query rows over a bounded number of consecutive tiles, and
// the partial result that later merges with others.
//
// This header declares data only. The ISA files include it and must not emit a function that
// another translation unit could pick up, so nothing here has a body.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/format/element.h"
#include "kernels/format/tile_shape.h"

namespace tessera::kernels {

inline constexpr std::uint32_t kMaxPartRuns = 64;  // 64 tiles of 32 entries
inline constexpr std::uint32_t kMaxPartRows = 32;  // query rows; longer blocks are cut

// Live rows [row_begin, row_begin + row_count) of one tile. Never empty. All bytes of the tile are
// readable; those of other rows are dead and may hold anything.
struct RowRun {
  const std::byte* tile;
  // Of row `row_begin`, the others follow; where the tile has positions: what its words count from.
  std::uint64_t position;
  std::uint32_t row_begin;
  std::uint32_t row_count;
};

// One query head of one query token, and the positions that it may see. Over dense tiles: head_dim
// elements of the model's type. Over packed tiles: R_k q in fp32, padded_channels of them, zeros
// behind the last.
struct QueryRow {
  const std::byte* query;
  std::uint64_t visible_begin;
  std::uint64_t visible_end;  // exclusive
};

// How what is read soon is requested: cores want opposite things. kernels/cpu/README.md has the
// measurements.
struct Lookahead {
  bool into_l1 = false;  // dense and whole packed tiles; else into L2
  // How far ahead of what is computed with, in bytes of a dense tile; a whole tile where it is
  // less.
  std::uint32_t bytes = 0xffffffffu;
};

// All runs share one shape.
struct AttendPart {
  const RowRun* runs;
  const QueryRow* rows;
  std::uint32_t run_count;  // 0 .. kMaxPartRuns
  std::uint32_t row_count;  // 1 .. kMaxPartRows
  TileShape shape;
  TileLayout layout;              // of `shape`
  std::uint32_t padded_channels;  // of `shape`; head_dim where it is dense
  float scale;
  float logit_softcap;  // 0: none
  Lookahead lookahead;
};

// The result, per query row r, over the entries that r may see, with
// x = logit * log2(e) + log2(weight):
//   max[r] = max x,  sum[r] = sum 2^(x - max),  output[r] = sum 2^(x - max) * v
// v is the row as it is stored: over packed tiles the output is in the rotated space of V. A row
// that sees nothing gives the neutral element: max -infinity, sum 0, output 0. A NaN in a row or a
// query gives NaN in `sum`, so `sum == 0` is what tells the neutral element.
struct PartialRows {
  float* max;     // [row_count]
  float* sum;     // [row_count]
  float* output;  // [row_count][padded_channels], 64-byte aligned
};

// y = R x for each row x: queries on their way into a segment's space.
struct RotateJob {
  const std::byte*
      rotation;  // [channels][head_dim], rows of 64-byte aligned memory; null: identity
  ElementType rotation_type;
  std::uint32_t channels;
  std::uint32_t head_dim;
  const std::byte* const* rows;  // [row_count], each head_dim elements
  ElementType row_type;
  std::uint32_t row_count;  // 1 .. kMaxPartRows
  float* output;            // [row_count][padded_channels]; zeros from `channels` on
  std::uint32_t padded_channels;
};

// x = R^T y for each row y: outputs on their way back.
struct UnrotateJob {
  const std::byte* rotation;  // as above; null: identity
  ElementType rotation_type;
  std::uint32_t channels;
  std::uint32_t head_dim;
  const float* rows;  // [row_count][padded_channels]
  std::uint32_t padded_channels;
  std::uint32_t row_count;  // 1 .. kMaxPartRows
  float* output;            // [row_count][head_dim]
};

// The first `blocks` blocks of a tile are to be scored, of which the last has `last_entries`.
struct BlockRun {
  const std::byte* summaries;
  const std::byte* tile;  // for the weights of its entries
  std::uint32_t blocks;
  std::uint32_t last_entries;
};

// score[r][i] = scale * (bound on, or estimate of, q.k over block i) + max ln weight, for the
// blocks of all runs one after another. Rows are as RotateJob gives them, also over dense tiles.
struct ScorePart {
  const BlockRun* runs;
  std::uint32_t run_count;
  const float* rows;        // [row_count][padded_channels]
  std::uint32_t row_count;  // 1 .. kMaxPartRows
  TileShape shape;          // with a summary
  TileLayout layout;
  std::uint32_t padded_channels;
  float scale;
  float* scores;               // [row_count][score_stride]
  std::uint64_t score_stride;  // floats
};

// A block that selection may take.
struct BlockFacts {
  std::uint8_t entries;  // visible ones; 0: not a candidate
  std::uint8_t forced;   // 1: taken whatever its score
};

// Takes blocks by falling value until they hold `budget` entries; forced ones first, and within the
// budget; ties to the lower block. The value of a block is the largest over rows of its score, less
// (by_share) the row's log-sum-exp over all candidates.
struct SelectJob {
  const float* scores;  // [row_count][score_stride]
  std::uint64_t score_stride;
  std::uint32_t row_count;
  const BlockFacts* blocks;  // [block_count]
  std::uint32_t block_count;
  std::uint64_t budget;
  bool by_share;
  float* values;        // [block_count], scratch
  std::uint8_t* taken;  // [block_count]: 1 or 0
};

// Entries on their way into a packed tile (or a dense one with summaries): rotated, selected,
// quantised. `key` and `value` rows have head_dim elements of `type`.
struct EncodeJob {
  const std::byte* key;
  const std::byte* value;
  std::uint64_t stride;  // bytes between rows
  ElementType type;
  std::uint32_t rows;              // 1 .. 32; those behind become zeros
  const float* weights;            // [rows]; null: 1
  const std::uint32_t* positions;  // [rows]; null: 0, 1, 2, ...
  TileShape shape;
  TileLayout layout;
  const std::byte* prepared;  // what PrepareEncode made of the rotations
  std::byte* tile;            // layout.bytes, every one written
  std::byte* summaries;       // layout.summary_bytes, likewise
};

// A row of a tile, to be copied as it is.
struct GatherRow {
  const std::byte* tile;
  std::uint32_t row;
  std::uint32_t position;  // the word of the new tile, where it has positions
};

// A new tile of rows from others, none encoded anew; blocks are summed up from the stored rows.
struct GatherJob {
  const GatherRow* rows;
  std::uint32_t row_count;  // 1 .. 32
  TileShape from;           // the sources' shape: `to`, but for weights and positions
  TileLayout from_layout;
  TileShape to;
  TileLayout to_layout;
  std::byte* tile;
  std::byte* summaries;
};

// Rows of a tile as fp32 in the space in which they are stored, dropped channels 0.
struct DecodeJob {
  const std::byte* tile;
  TileShape shape;
  TileLayout layout;
  std::uint32_t rows;  // 1 .. 32
  std::uint32_t padded_channels;
  float* keys;    // [rows][padded_channels], 64-byte aligned
  float* values;  // likewise
};

// sums[i][j] += sum over rows of x_i x_j, for j >= i.
struct MomentsJob {
  const std::byte* rows;
  std::uint64_t stride;
  ElementType type;
  std::uint32_t row_count;
  std::uint32_t head_dim;
  double* sums;  // [head_dim][head_dim]; below the diagonal untouched
};

// What queries pay to keys:
//   sums[t] += sum over rows r with visible_begin[r] <= t < visible_end[r] of a(r, t)
// a: the softmax over those t of x = scale * q_r . k_t (capped, where there is a cap), plus the
// logarithm of how many tokens key t stands for; or, as logits, the product q_r . k_t itself,
// neither scaled nor capped nor weighed. A row that sees nothing adds nothing, and to a key that
// stands for no token at all, whose logarithm is -infinity; it sees another one then.
struct ObserveJob {
  const std::byte* keys;  // [key_count], each head_dim elements of `type`
  std::uint64_t key_stride;
  std::uint64_t key_count;
  const std::byte* queries;  // [query_count], likewise
  std::uint64_t query_stride;
  std::uint32_t query_count;
  const std::uint64_t* visible_begin;   // [query_count]; null: 0
  const std::uint64_t* visible_end;     // [query_count], at most key_count
  const float* log2_weights = nullptr;  // [key_count]; null: 0, every key is one token
  std::uint32_t head_dim;
  ElementType type;
  float scale;
  float logit_softcap;  // 0: none
  bool logits;
  float* scratch;  // [kObserveRows][key_count]
  double* sums;    // [key_count]
};
inline constexpr std::uint32_t kObserveRows = 8;  // queries that are looked at together

}  // namespace tessera::kernels
