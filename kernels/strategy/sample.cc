#include "kernels/strategy/sample.h"

#include <algorithm>

#include "kernels/format/dense_tile.h"

namespace tessera::kernels {
namespace {

std::vector<RowRange> RangesOf(std::uint64_t rows, std::uint64_t length) {
  std::vector<RowRange> ranges;
  for (std::uint64_t first = 0; first < rows; first += length) {
    ranges.push_back({first, static_cast<std::uint32_t>(std::min(length, rows - first))});
  }
  return ranges;
}

}  // namespace

std::vector<RowRange> TilesOf(std::uint64_t rows) { return RangesOf(rows, kTileEntries); }

Folds SplitRows(std::uint64_t rows) {
  const bool has_two_tiles = rows >= 2 * kTileEntries;
  const std::vector<RowRange> ranges =
      RangesOf(rows, has_two_tiles ? kTileEntries : (rows + 1) / 2);
  if (ranges.size() < 2) return {.made_from = ranges, .judged_on = ranges};
  Folds folds;
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    (i % 2 == 0 ? folds.made_from : folds.judged_on).push_back(ranges[i]);
  }
  return folds;
}

std::vector<RowRange> Spread(const std::vector<RowRange>& ranges, std::uint64_t limit) {
  const std::uint64_t wanted = std::clamp<std::uint64_t>(limit / kTileEntries, 1, ranges.size());
  std::vector<RowRange> spread;
  for (std::uint64_t i = 0; i < wanted; ++i) {
    RowRange range = ranges[(2 * i + 1) * ranges.size() / (2 * wanted)];
    // Takes effect only if `limit` is less than one tile.
    range.count = static_cast<std::uint32_t>(
        std::min<std::uint64_t>(range.count, std::max<std::uint64_t>(limit, 1)));
    spread.push_back(range);
  }
  return spread;
}

}  // namespace tessera::kernels
