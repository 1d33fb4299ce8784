#include "kernels/strategy/sample.h"

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "tests/fakes/seed.h"

namespace tessera::kernels {
namespace {

std::uint64_t RowsOf(const std::vector<RowRange>& ranges) {
  std::uint64_t rows = 0;
  for (const RowRange& range : ranges) rows += range.count;
  return rows;
}

// The fold of each row: 1, 2, or 3 for both.
std::vector<int> FoldOfRows(std::uint64_t rows, const Folds& folds) {
  std::vector<int> fold(rows);
  for (const RowRange& range : folds.made_from) {
    for (std::uint32_t r = 0; r < range.count; ++r) fold.at(range.first + r) |= 1;
  }
  for (const RowRange& range : folds.judged_on) {
    for (std::uint32_t r = 0; r < range.count; ++r) fold.at(range.first + r) |= 2;
  }
  return fold;
}

TEST(Folds, AreEveryOtherTile) {
  TestRandom random;
  for (int round = 0; round < 100; ++round) {
    const std::uint64_t rows = random.Between(64, 2000);
    const std::vector<int> fold = FoldOfRows(rows, SplitRows(rows));
    for (std::uint64_t r = 0; r < rows; ++r) ASSERT_EQ(fold[r], r / 32 % 2 == 0 ? 1 : 2) << r;
  }
}

TEST(Folds, OfFewerThanTwoTilesAreHalves) {
  for (std::uint64_t rows = 2; rows < 64; ++rows) {
    const std::vector<int> fold = FoldOfRows(rows, SplitRows(rows));
    for (std::uint64_t r = 0; r < rows; ++r) ASSERT_EQ(fold[r], r < (rows + 1) / 2 ? 1 : 2);
  }
}

TEST(Folds, ShareASingleRow) { EXPECT_EQ(FoldOfRows(1, SplitRows(1)), std::vector<int>{3}); }

TEST(Spread, KeepsToItsLimitAndReachesFar) {
  TestRandom random;
  for (int round = 0; round < 300; ++round) {
    const std::uint64_t rows = random.Between(1, 5000);
    const std::uint64_t limit = random.Between(1, 6000);
    const std::vector<RowRange> tiles = TilesOf(rows);
    EXPECT_EQ(RowsOf(tiles), rows);
    const std::vector<RowRange> spread = Spread(tiles, limit);
    ASSERT_FALSE(spread.empty());
    EXPECT_LE(RowsOf(spread), limit);
    EXPECT_GE(RowsOf(spread), 1u);
    if (limit >= rows + 31) {
      EXPECT_EQ(RowsOf(spread), rows);
    }
    // All gaps between neighbours, and to the ends, are close to an even spacing.
    const double even = static_cast<double>(tiles.size()) / static_cast<double>(spread.size());
    double expected = (even - 1) / 2;
    for (const RowRange& range : spread) {
      EXPECT_EQ(range.first % 32, 0u);
      EXPECT_NEAR(static_cast<double>(range.first / 32), expected, 1.0);
      expected += even;
    }
  }
}

}  // namespace
}  // namespace tessera::kernels
