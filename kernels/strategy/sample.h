// Selects the rows of a segment that are sampled.
#pragma once

#include <cstdint>
#include <vector>

namespace tessera::kernels {

struct RowRange {
  std::uint64_t first = 0;
  std::uint32_t count = 0;  // 1 .. 32
};

// All rows, one range per tile.
std::vector<RowRange> TilesOf(std::uint64_t rows);

// Two folds of alternating tiles; whole tiles, because neighbouring rows are similar. Fewer rows
// than two tiles are split in halves, and a single row is in both folds.
struct Folds {
  std::vector<RowRange> made_from;  // the trial rotation is made from these
  std::vector<RowRange> judged_on;
};
Folds SplitRows(std::uint64_t rows);

// A subset of `ranges`, evenly spread, with at most `limit` rows but at least one range.
std::vector<RowRange> Spread(const std::vector<RowRange>& ranges, std::uint64_t limit);

}  // namespace tessera::kernels
