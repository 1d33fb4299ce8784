// What one kernel call computes: a few query rows over a bounded number of consecutive tiles, and
// the partial result that later merges with others.
//
// This header declares data only. The ISA files include it and must not emit a function that
// another translation unit could pick up, so nothing here has a body.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/format/element.h"

namespace tessera::kernels {

inline constexpr std::uint32_t kMaxPartRuns = 64;  // 64 tiles of 32 entries
inline constexpr std::uint32_t kMaxPartRows = 32;  // query rows; longer blocks are cut

// Live rows [row_begin, row_begin + row_count) of one dense tile, at consecutive positions. Never
// empty. All bytes of the tile are readable; those of other rows are dead and may hold anything.
struct RowRun {
  const std::byte* tile;
  std::uint64_t position;  // of row `row_begin`
  std::uint32_t row_begin;
  std::uint32_t row_count;
};

// One query head of one query token: head_dim elements, and the positions that it may see.
struct QueryRow {
  const std::byte* query;
  std::uint64_t visible_begin;
  std::uint64_t visible_end;  // exclusive
};

struct AttendPart {
  const RowRun* runs;
  const QueryRow* rows;
  std::uint32_t run_count;  // 0 .. kMaxPartRuns
  std::uint32_t row_count;  // 1 .. kMaxPartRows
  std::uint32_t head_dim;   // one of kHeadDims
  ElementType type;         // of K, V and Q
  float scale;
  float logit_softcap;  // 0: none
};

// The result, per query row r, over the entries that r may see, with x = logit * log2(e):
//   max[r] = max x,  sum[r] = sum 2^(x - max),  output[r] = sum 2^(x - max) * v
// A row that sees nothing gives the neutral element: max -infinity, sum 0, output 0. A NaN in a
// row or a query gives NaN in `sum`, so `sum == 0` is what tells the neutral element.
struct PartialRows {
  float* max;     // [row_count]
  float* sum;     // [row_count]
  float* output;  // [row_count][head_dim], 64-byte aligned
};

}  // namespace tessera::kernels
