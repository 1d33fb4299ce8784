// The rows that one pass of attention over packed tiles works on: up to 32, of one or several runs.
// Internal linkage throughout: see README.md.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attend/attend_part-inl.h"
#include "kernels/cpu/attend/expand-inl.h"
#include "kernels/format/part.h"

namespace tessera::kernels {
namespace {

// Rows of a run that stand together among the gathered ones.
struct Piece {
  const RowRun* run;
  std::uint32_t first;  // tile row
  std::uint32_t count;
  std::uint32_t at;  // among the gathered rows
};

// Where in the part's runs the next row is.
struct Cursor {
  std::uint32_t run = 0;
  std::uint32_t row = 0;  // of the run
};

// Where the gathered rows of K, or of V, are. Behind the last one it stands again.
struct RowList {
  const std::byte* bits[kTileRows];
  const std::byte* data[kTileRows];
  std::uint32_t row_data;  // bytes of each one's values
  int channels;            // of each one
  bool into_l1;            // how they are requested
};

struct Gathered {
  Piece pieces[kTileRows];
  std::uint32_t count;  // of pieces
  std::uint32_t rows;   // 0: nothing was left
  RowList keys;
  RowList values;
};

// Rows [first, first + count) become rows `at` and on of the list.
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

// The next rows of the part, up to 32.
TESSERA_SIMD void Gather(const AttendPart& part, Cursor& cursor, Gathered& gathered) {
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
    // A step loads a line's width, so the last row's load what stands behind it; nobody else asks
    // for that line (a whole latency of memory per piece).
    PrefetchLines<kIntoL2>(values.data + (first + count) * values.row_data, 1);
    gathered.rows += count;
    cursor.row += count;
    if (cursor.row == run.row_count) cursor = {.run = cursor.run + 1, .row = 0};
  }
  // Short runs into L2: what waits for a translation would keep the lines that L1 can wait for.
  gathered.keys.into_l1 = gathered.values.into_l1 = gathered.count == 1 && part.lookahead.into_l1;
  if (gathered.rows == 0 || gathered.rows == kTileRows) return;
  RepeatLast(gathered.rows, gathered.keys);
  RepeatLast(gathered.rows, gathered.values);
}

// Copies of rows behind which the tile ends before their steps' loads may.
struct ShortRows {
  alignas(64) std::byte rows[kTileRows][kMaxHeadDim * 2 + kStepBytes];
};

// Lists such rows of V where they may be loaded: `plain_bytes` from where they begin on, whatever
// their bitmap says, and a step behind their end. Of K there are none: V stands behind them.
TESSERA_SIMD void CopyShortRows(const TileLayout& layout, std::uint32_t plain_bytes,
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
      if (row_data == kStepBytes) {  // by far the most frequent: a quarter of 128 channels
        Simd::CopyStep(listed, copy);
      } else {
        __builtin_memcpy(copy, listed, row_data);
      }
      listed = copy;
    }
  }
  RepeatLast(gathered.rows, gathered.values);
}

// Requests rows [first, first + kRowsAtOnce): a few behind each step's own loads, since a burst of
// requests for a whole tile would stop the core until memory has answered.
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

// Loads that bring the translations for the requests to come, of all short runs at once, so that
// they wait together: for each by itself the core would wait longer than its requests gain.
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
