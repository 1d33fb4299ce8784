// The arguments of one kernel call: a few query rows over a bounded number of consecutive tiles,
// and the partial result, which is later merged with others.
//
// This header declares data only. ISA files include it and must not emit a function that another
// translation unit could link against, so nothing here has a body.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/format/element.h"
#include "kernels/format/tile_shape.h"

namespace tessera::kernels {

inline constexpr std::uint32_t kMaxPartRuns = 64;   // 64 tiles of 32 entries
inline constexpr std::uint32_t kMaxQuadRuns = 256;  // over planes, whose selected runs are short
inline constexpr std::uint32_t kMaxPartRows = 32;   // query rows; longer query blocks are split

// Live rows [row_begin, row_begin + row_count) of one tile; never empty. All bytes of the tile are
// readable. Its other rows are dead and may hold anything.
struct RowRun {
  const std::byte* tile;
  // The position of row `row_begin`; the other rows follow. If the tile has position words: their
  // base.
  std::uint64_t position;
  std::uint32_t row_begin;
  std::uint32_t row_count;
};

// One query head of one query token, and the positions visible to it. Over dense tiles `query` is
// head_dim elements of the model's type. Over packed tiles it is R_k q in fp32, zero-padded to
// padded_channels.
//
// Over planes, every implementation rounds R_k q to the same int8 codes: per plane
// scale = max |q'| / 127 (1 if that is 0) and code = round(q' / scale), ties to even, in fp32.
struct QueryRow {
  const std::byte* query;
  std::uint64_t visible_begin;
  std::uint64_t visible_end;  // exclusive
  float mean_product = 0;     // q . mu_k, added to each dot product over planes
};

// How upcoming tiles are prefetched. CPU families want opposite settings: see
// kernels/cpu/README.md.
struct Lookahead {
  bool into_l1 = false;  // dense and whole packed tiles; otherwise into L2
  // The prefetch distance in bytes of a dense tile; at most one tile.
  std::uint32_t bytes = 0xffffffffu;
};

// One attention call over tiles of one shape.
struct AttendPart {
  const RowRun* runs;
  const QueryRow* rows;
  std::uint32_t run_count;  // 0 .. kMaxPartRuns; over planes 0 .. kMaxQuadRuns, of up to 512 quads
  std::uint32_t row_count;  // 1 .. kMaxPartRows
  TileShape shape;
  TileLayout layout;              // of `shape`
  std::uint32_t padded_channels;  // of `shape`; head_dim if it is dense
  float scale;
  float logit_softcap;  // 0: none
  Lookahead lookahead;
};

// The result for each query row r over its visible entries, with x = logit * log2(e) +
// log2(weight):
//   max[r] = max x,  sum[r] = sum 2^(x - max),  output[r] = sum 2^(x - max) * v
// v is the stored row: over packed tiles the output is in the rotated space of V. A row that sees
// no entry gives the neutral element: max -infinity, sum 0, output 0. NaN in a row or query makes
// `sum` NaN, so `sum == 0` identifies the neutral element.
struct PartialRows {
  float* max;     // [row_count]
  float* sum;     // [row_count]
  float* output;  // [row_count][padded_channels], 64-byte aligned
};

// y = R x for each row x. Rotates queries into a segment's space.
struct RotateJob {
  const std::byte* rotation;  // [channels][head_dim], 64-byte aligned; null: identity
  ElementType rotation_type;
  std::uint32_t channels;
  std::uint32_t head_dim;
  const std::byte* const* rows;  // [row_count], each head_dim elements
  ElementType row_type;
  std::uint32_t row_count;  // 1 .. kMaxPartRows
  float* output;            // [row_count][padded_channels]; zeros from `channels` on
  std::uint32_t padded_channels;
  // If set: mean_products[r] = x . mean.
  const std::byte* mean = nullptr;  // bf16 [head_dim]
  float* mean_products = nullptr;   // [row_count]
};

// x = R^T y for each row y. Rotates outputs back.
struct UnrotateJob {
  const std::byte* rotation;  // as above; null: identity
  ElementType rotation_type;
  std::uint32_t channels;
  std::uint32_t head_dim;
  const float* rows;  // [row_count][padded_channels]
  std::uint32_t padded_channels;
  std::uint32_t row_count;  // 1 .. kMaxPartRows
  float* output;            // [row_count][head_dim]
  // If set: x = R^T y + (weights[r] or 1) mean.
  const std::byte* mean = nullptr;  // bf16 [head_dim]
  const float* weights = nullptr;   // [row_count]
};

// The first `blocks` blocks of a tile, to be scored. The last one has `last_entries` entries.
struct BlockRun {
  const std::byte* summaries;
  const std::byte* tile;  // for the weights of its entries
  std::uint32_t blocks;
  std::uint32_t last_entries;
};

// score[r][i] = scale * (bound on, or estimate of, q.k over block i) + max ln weight, for the
// blocks of all runs in order. `rows` are outputs of RotateJob, also over dense tiles.
//
// Over signs, score[r][i] = max over the block's entries of norm * (codes . signs) / |codes|, where
// `codes` are the first head_dim / 2 channels of the row rounded to int8 as for attention over
// planes (1 instead of |codes| if that is 0), and signs are +1 or -1.
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
  std::uint8_t entries;  // visible entries; 0: not a candidate
  std::uint8_t forced;   // 1: taken regardless of its score
};

// Takes blocks by falling value until they hold `budget` entries. Forced blocks are taken first and
// count towards the budget; ties go to the lower block. A block's value is the maximum over rows of
// its score, minus the row's log-sum-exp over all candidates if `by_share` is set.
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

// Encodes entries into a packed tile, planes, or a dense tile with summaries: rotate, select
// channels, quantize. `key` and `value` rows have head_dim elements of `type`.
struct EncodeJob {
  const std::byte* key;
  const std::byte* value;
  std::uint64_t stride;  // bytes between rows
  ElementType type;
  std::uint32_t rows;              // 1 .. 32; the remaining rows are zeroed
  const float* weights;            // [rows]; null: 1
  const std::uint32_t* positions;  // [rows]; null: 0, 1, 2, ...
  TileShape shape;
  TileLayout layout;
  const std::byte* prepared;  // output of `prepare_encode`
  std::byte* tile;            // layout.bytes; every byte is written
  std::byte* summaries;       // layout.summary_bytes; likewise
  // Planes only: `encode` refuses a row whose squared error exceeds both the limit of its side and
  // kRefusedShare of |z|^2.
  float key_error_limit = __builtin_inff();
  float value_error_limit = __builtin_inff();
};
inline constexpr float kRefusedShare = 0.05f;

// A row of a tile, copied unchanged.
struct GatherRow {
  const std::byte* tile;
  std::uint32_t row;
  std::uint32_t position;                // position word in the new tile, if it has positions
  const std::byte* summaries = nullptr;  // of `tile`, if the new tile has signs
};

// Builds a tile from rows of others without re-encoding them. Summaries are computed from the
// stored rows, except signs, which are copied from the sources' index.
struct GatherJob {
  const GatherRow* rows;
  std::uint32_t row_count;  // 1 .. 32
  // The shape of the sources: `to`, except for weights and positions, and for planes that `to`
  // keeps without crumbs (4 bits of 6). If `to` has signs, so has `from`.
  TileShape from;
  TileLayout from_layout;
  TileShape to;
  TileLayout to_layout;
  std::byte* tile;
  std::byte* summaries;
};

// Reads rows of a tile as fp32, in the space they are stored in, with dropped channels set to 0.
// UnrotateJob turns them back; over planes it adds the mean.
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
  double* sums;  // [head_dim][head_dim]; the part below the diagonal is not touched
};

// The attention that queries pay to keys:
//   sums[t] += sum over rows r with visible_begin[r] <= t < visible_end[r] of a(r, t)
// a(r, .) is the softmax over row r's visible keys of x = scale * q_r . k_t (soft-capped if the
// layer has a cap) plus the log of key t's weight. If `logits` is set, a is the raw product q_r .
// k_t, neither scaled, capped nor weighted. A row that sees no key adds nothing. A key of weight 0
// (log -infinity) receives nothing; a row that sees it must also see a key of positive weight.
struct ObserveJob {
  const std::byte* keys;  // [key_count], each head_dim elements of `type`
  std::uint64_t key_stride;
  std::uint64_t key_count;
  const std::byte* queries;  // [query_count], likewise
  std::uint64_t query_stride;
  std::uint32_t query_count;
  const std::uint64_t* visible_begin;   // [query_count]; null: 0
  const std::uint64_t* visible_end;     // [query_count], at most key_count
  const float* log2_weights = nullptr;  // [key_count]; null: all 0, each key is one token
  std::uint32_t head_dim;
  ElementType type;
  float scale;
  float logit_softcap;  // 0: none
  bool logits;
  float* scratch;  // [kObserveRows][key_count]
  double* sums;    // [key_count]
};
inline constexpr std::uint32_t kObserveRows = 8;  // queries processed together

}  // namespace tessera::kernels
