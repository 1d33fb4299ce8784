// Computes how many of a lane's newest rows count towards a selection budget, row by row.
#pragma once

#include <cstdint>

#include "kernels/format/dense_tile.h"
#include "kernels/format/lane_view.h"

namespace tessera::kernels {

// Tail rows within the visible range [begin, end).
inline std::uint64_t RowsOfTail(const LaneView& lane, std::uint64_t begin, std::uint64_t end) {
  std::uint64_t rows = 0;
  for (std::uint64_t position = lane.tail.begin; position < lane.tail.end; ++position) {
    rows += position >= begin && position < end ? 1 : 0;
  }
  return rows;
}

// Visible rows of the last tile, if it is not full and its segment has no blocks.
inline std::uint64_t RowsOfLastTile(const SegmentView& last, std::uint64_t begin,
                                    std::uint64_t end) {
  if (last.shape.block != 0 || last.shape.positions) return 0;
  std::uint64_t rows = 0;
  for (std::uint32_t entry = last.entries; entry % kTileEntries != 0; --entry) {
    const std::uint64_t position = last.first_position + entry - 1;
    rows += position >= begin && position < end ? 1 : 0;
  }
  return rows;
}

// The part of the budget outside of segments' blocks: `rows` and the `partial` entries of the
// newest block, rounded up to whole blocks, minus `partial`.
inline std::uint64_t OutsideOfBlocks(std::uint64_t rows, std::uint64_t partial,
                                     std::uint64_t block) {
  std::uint64_t whole = rows + partial;
  while (whole % block != 0) ++whole;
  return whole - partial;
}

}  // namespace tessera::kernels
