// The rows that one pass of attention over packed tiles works on: up to 32, from one or several
// runs. Internal linkage throughout: see ../README.md.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attend/attend_part-inl.h"
#include "kernels/cpu/attend/expand-inl.h"
#include "kernels/format/part.h"

namespace tessera::kernels {
namespace {

// Rows of one run that are contiguous among the gathered rows.
struct Piece {
  const RowRun* run;
  std::uint32_t first;  // tile row
  std::uint32_t count;
  std::uint32_t at;  // index among the gathered rows
};

// The position of the next row in the part's runs.
struct Cursor {
  std::uint32_t run = 0;
  std::uint32_t row = 0;  // of the run
};

// The addresses of the gathered rows of K or V. The last one is repeated to fill the list.
struct RowList {
  const std::byte* bits[kTileRows];
  const std::byte* data[kTileRows];
  std::uint32_t row_data;  // bytes of values per row
  int channels;            // channels per row
  bool into_l1;            // prefetch target
};

struct Gathered {
  Piece pieces[kTileRows];
  std::uint32_t count;  // number of pieces
  std::uint32_t rows;   // 0: no rows were left
  RowList keys;
  RowList values;
};

// Appends rows [first, first + count) to the list at index `at`.
TESSERA_SIMD void ListPiece(const PackedRows& rows, std::uint32_t first, std::uint32_t count,
                            std::uint32_t at, RowList& list) {
  const std::byte* bits = rows.bits + first * rows.row_bits;
  const std::byte* data = rows.data + first * rows.row_data;
  const std::size_t row_bits = rows.row_bits;
  const std::size_t row_data = rows.row_data;
  for (std::size_t r = 0; r < count; ++r) list.bits[at + r] = bits + r * row_bits;
  for (std::size_t r = 0; r < count; ++r) list.data[at + r] = data + r * row_data;
  list.row_data = rows.row_data;
  list.channels = rows.channels;
}

TESSERA_SIMD void RepeatLast(std::uint32_t rows, RowList& list) {
  for (std::uint32_t r = rows; r < kTileRows; ++r) {
    list.bits[r] = list.bits[rows - 1];
    list.data[r] = list.data[rows - 1];
  }
}

// Gathers the next rows of the part, up to 32.
TESSERA_PER_PASS void Gather(const AttendPart& part, Cursor& cursor, Gathered& gathered) {
  gathered.count = 0;
  gathered.rows = 0;
  while (gathered.rows < kTileRows && cursor.run < part.run_count) {
    const RowRun& run = part.runs[cursor.run];
    const std::uint32_t left = run.row_count - cursor.row;
    const std::uint32_t room = kTileRows - gathered.rows;
    const std::uint32_t count = left < room ? left : room;
    const std::uint32_t first = run.row_begin + cursor.row;
    gathered.pieces[gathered.count++] = {
        .run = &run, .first = first, .count = count, .at = gathered.rows};
    ListPiece(KeysOf(part.shape, part.layout, run.tile), first, count, gathered.rows,
              gathered.keys);
    const PackedRows values = ValuesOfTile(part.shape, part.layout, run.tile);
    ListPiece(values, first, count, gathered.rows, gathered.values);
    // A step loads a whole line, so the last row loads the line after it. No other request covers
    // that line; without this one, every piece waits for memory once.
    PrefetchLines<kIntoL2>(values.data + (first + count) * values.row_data, 1);
    gathered.rows += count;
    cursor.row += count;
    if (cursor.row == run.row_count) cursor = {.run = cursor.run + 1, .row = 0};
  }
  // Short runs go to L2: a request that waits for address translation would occupy a line buffer of
  // L1.
  gathered.keys.into_l1 = gathered.values.into_l1 = gathered.count == 1 && part.lookahead.into_l1;
  if (gathered.rows == 0 || gathered.rows == kTileRows) return;
  RepeatLast(gathered.rows, gathered.keys);
  RepeatLast(gathered.rows, gathered.values);
}

// Copies of rows that end too close to the end of the tile for the loads of their steps.
struct ShortRows {
  alignas(64) std::byte rows[kTileRows][kMaxHeadDim * 2 + kStepBytes];
};

// Replaces such V rows in the list by copies: `plain_bytes` from each row's start must be readable
// whatever its bitmap says, and a step past its end. K rows need no copies: V follows them.
TESSERA_PER_PASS void CopyShortRows(const TileLayout& layout, std::uint32_t plain_bytes,
                                    Gathered& gathered, ShortRows& copies) {
  const std::uint32_t begin = layout.value_data;
  const std::uint32_t row_data = layout.value_row.data;
  const std::uint32_t loaded =
      row_data + kStepBytes > plain_bytes ? row_data + kStepBytes : plain_bytes;
  if (begin + (kTileRows - 1) * row_data + loaded <= layout.bytes) return;
  const std::uint32_t whole =
      begin + loaded > layout.bytes ? 0 : (layout.bytes - loaded - begin) / row_data + 1;
  for (std::uint32_t i = 0; i < gathered.count; ++i) {
    const Piece& piece = gathered.pieces[i];
    for (std::uint32_t r = whole > piece.first ? whole - piece.first : 0; r < piece.count; ++r) {
      std::byte* copy = copies.rows[piece.at + r];
      const std::byte*& listed = gathered.values.data[piece.at + r];
      if (row_data == kStepBytes) {  // the most frequent case: a quarter of 128 channels
        Simd::CopyStep(listed, copy);
      } else {
        __builtin_memcpy(copy, listed, row_data);
      }
      listed = copy;
    }
  }
  RepeatLast(gathered.rows, gathered.values);
}

// Prefetches rows [first, first + kRowsAtOnce). Called a few rows at a time after each step's
// loads: a burst for a whole tile would stall the core until memory answers.
template <int kInto>
TESSERA_SIMD void RequestInto(const RowList& list, int first) {
  TESSERA_UNROLL for (int r = first; r < first + kRowsAtOnce; ++r)
      PrefetchLines<kInto>(list.data[r], 1);
  PrefetchLines<kInto>(list.bits[first], 1);
  if (list.row_data <= kLine) return;
  for (int r = first; r < first + kRowsAtOnce; ++r) {
    PrefetchLines<kInto>(list.data[r] + kLine, list.row_data - kLine);
  }
}
TESSERA_SIMD void Request(const RowList& list, int first) {
  if (list.into_l1) {
    RequestInto<kIntoL1>(list, first);
  } else {
    RequestInto<kIntoL2>(list, first);
  }
}

// Loads one byte of K and V of every short run, to bring the address translations for later
// prefetches. All at once, so that they wait together: one by one they would cost more than the
// prefetches gain.
TESSERA_SIMD void TouchShortRuns(const AttendPart& part) {
  for (std::uint32_t i = 0; i < part.run_count; ++i) {
    const RowRun& run = part.runs[i];
    if (run.row_count == kTileRows) continue;
    const TileLayout& layout = part.layout;
    Touch(run.tile + layout.key_data + run.row_begin * layout.key_row.data);
    Touch(run.tile + layout.value_data + run.row_begin * layout.value_row.data);
  }
}

}  // namespace
}  // namespace tessera::kernels
