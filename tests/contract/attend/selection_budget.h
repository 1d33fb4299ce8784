// What the newest rows of a lane take of a selection's budget that counts them, row by row.
#pragma once

#include <cstdint>

#include "kernels/format/dense_tile.h"
#include "kernels/format/lane_view.h"

namespace tessera::kernels {

// Those of the tail that are seen from [begin, end).
inline std::uint64_t RowsOfTail(const LaneView& lane, std::uint64_t begin, std::uint64_t end) {
  std::uint64_t rows = 0;
  for (std::uint64_t position = lane.tail.begin; position < lane.tail.end; ++position) {
    rows += position >= begin && position < end ? 1 : 0;
  }
  return rows;
}

// Likewise, of a last tile that is not full, where its segment has no blocks.
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

// They and `partial` entries of a newest block, which segments hold, fill whole blocks: what of
// these is not of segments.
inline std::uint64_t OutsideOfBlocks(std::uint64_t rows, std::uint64_t partial,
                                     std::uint64_t block) {
  std::uint64_t whole = rows + partial;
  while (whole % block != 0) ++whole;
  return whole - partial;
}

}  // namespace tessera::kernels
