// Which rows of a run are looked at.
#pragma once

#include <cstdint>
#include <vector>

namespace tessera::kernels {

struct RowRange {
  std::uint64_t first = 0;
  std::uint32_t count = 0;  // 1 .. 32
};

// All rows, tile by tile.
std::vector<RowRange> TilesOf(std::uint64_t rows);

// Every other tile to each. Neighbouring rows are alike, so a fold is whole tiles where there are
// two; fewer rows are split in halves, and a single row is in both folds.
struct Folds {
  std::vector<RowRange> made_from;  // what a trial rotation is made from
  std::vector<RowRange> judged_on;
};
Folds SplitRows(std::uint64_t rows);

// Of `ranges`, evenly spread, as many as hold at most `limit` rows; never none.
std::vector<RowRange> Spread(const std::vector<RowRange>& ranges, std::uint64_t limit);

}  // namespace tessera::kernels
