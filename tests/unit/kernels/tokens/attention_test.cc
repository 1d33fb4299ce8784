// What queries pay: ranges that they see, and shares among some of the keys.
#include "kernels/tokens/attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "tests/unit/kernels/tokens/rows.h"

namespace tessera::kernels {
namespace {

using testing::DoubleNear;
using testing::ElementsAre;
using testing::Pointwise;

TEST(Attention, RangesAreWhatIsNotYoungerAndWithinTheWindow) {
  TestRandom random;
  for (int round = 0; round < 500; ++round) {
    std::vector<std::uint64_t> entries;
    std::vector<std::uint64_t> queries;
    for (std::uint64_t position = 0; position < 40; ++position) {
      if (random.OneIn(2)) entries.push_back(position);
      if (random.OneIn(3)) queries.push_back(position);
    }
    const auto window = static_cast<std::uint32_t>(random.OneIn(2) ? 0 : random.Between(1, 50));
    const VisibleRanges visible = CausalRanges(queries, entries, window);
    for (std::size_t q = 0; q < queries.size(); ++q) {
      for (std::size_t e = 0; e < entries.size(); ++e) {
        const bool seen =
            entries[e] <= queries[q] && (window == 0 || queries[q] - entries[e] < window);
        EXPECT_EQ(visible.begin[q] <= e && e < visible.end[q], seen);
      }
    }
  }
  EXPECT_THAT(FullRanges(2, 7).begin, ElementsAre(0, 0));
  EXPECT_THAT(FullRanges(2, 7).end, ElementsAre(7, 7));
}

// Among all keys, what the implementation's own sums are; among some, shares of those alone.
TEST(Attention, SharesAmongSomeKeys) {
  TestRandom random;
  for (int round = 0; round < 50; ++round) {
    const TestRows keys(random.Between(1, 50), random);
    const TestRows query(1, random);
    const LayerGeometry geometry = TestGeometry(random.OneIn(2) ? 0.0f : 2.0f);
    AttentionSums attention(ReferenceOperations(), geometry);
    std::vector<double> products(keys.count());
    attention.AddLogits(query.range(), keys.range(), FullRanges(1, keys.count()), products);
    for (std::uint64_t i = 0; i < keys.count(); ++i) {
      EXPECT_NEAR(products[i], query.Dot(0, keys, i), 1e-9);
    }
    std::vector<std::uint32_t> all(keys.count());
    std::iota(all.begin(), all.end(), 0u);
    std::vector<double> shares(keys.count(), 1);
    AddSharesAmong(products, all, geometry, 0.5, shares);
    std::vector<double> expected(keys.count());
    attention.AddShares(query.range(), keys.range(), FullRanges(1, keys.count()), expected);
    for (double& share : expected) share = 1 + 0.5 * share;
    EXPECT_THAT(shares, Pointwise(DoubleNear(1e-6), expected));

    std::vector<std::uint32_t> some;
    for (const std::uint32_t i : all) {
      if (random.OneIn(2)) some.push_back(i);
    }
    std::vector<double> among(some.size());
    AddSharesAmong(products, some, geometry, 1, among);
    if (some.empty()) continue;
    EXPECT_NEAR(std::accumulate(among.begin(), among.end(), 0.0), 1, 1e-9);
    for (std::size_t i = 1; i < some.size(); ++i) {
      EXPECT_NEAR(among[i] / among[0], (expected[some[i]] - 1) / (expected[some[0]] - 1),
                  1e-4 * (1 + among[i] / among[0]));
    }
  }
}

TEST(Attention, NothingIsPaidWhereNothingIsSeen) {
  TestRandom random;
  const TestRows keys(3, random);
  const TestRows query(1, random);
  const LayerGeometry geometry = TestGeometry();
  AttentionSums attention(ReferenceOperations(), geometry);
  std::vector<double> sums(3);
  attention.AddShares(query.range(), keys.range(), {.begin = {2}, .end = {2}}, sums);
  EXPECT_THAT(sums, ElementsAre(0, 0, 0));
  attention.AddShares(query.range(), {}, {.begin = {0}, .end = {0}}, {});
  AddSharesAmong({}, {}, geometry, 1, {});
}

}  // namespace
}  // namespace tessera::kernels
