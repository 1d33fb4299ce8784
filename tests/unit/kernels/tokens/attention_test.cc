// Attention observation: visible ranges, and shares among some of the keys.
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

// Among all keys they equal the implementation's sums; among some keys, shares of these alone.
TEST(Attention, SharesAmongSomeKeys) {
  TestRandom random;
  for (int round = 0; round < 50; ++round) {
    const TestRows keys(random.Between(1, 50), random);
    const TestRows query(1, random);
    const LayerGeometry geometry = TestGeometry(random.OneIn(2) ? 0.0f : 2.0f);
    AttentionSums attention(ReferenceOperations(), geometry);
    std::vector<double> products(keys.count());
    attention.Add(keys.range(), {.queries = query.range(),
                                 .visible = FullRanges(1, keys.count()),
                                 .logits = true,
                                 .sums = products});
    for (std::uint64_t i = 0; i < keys.count(); ++i) {
      EXPECT_NEAR(products[i], query.Dot(0, keys, i), 1e-9);
    }
    std::vector<std::uint32_t> all(keys.count());
    std::iota(all.begin(), all.end(), 0u);
    std::vector<double> shares(keys.count(), 1);
    AddSharesOfVisible({.products = products}, all, geometry, 0.5, shares);
    std::vector<double> expected(keys.count());
    attention.Add(
        keys.range(),
        {.queries = query.range(), .visible = FullRanges(1, keys.count()), .sums = expected});
    for (double& share : expected) share = 1 + 0.5 * share;
    EXPECT_THAT(shares, Pointwise(DoubleNear(1e-6), expected));

    std::vector<std::uint32_t> some;
    for (const std::uint32_t i : all) {
      if (random.OneIn(2)) some.push_back(i);
    }
    std::vector<double> among(some.size());
    AddSharesOfVisible({.products = products}, some, geometry, 1, among);
    if (some.empty()) continue;
    EXPECT_NEAR(std::accumulate(among.begin(), among.end(), 0.0), 1, 1e-9);
    for (std::size_t i = 1; i < some.size(); ++i) {
      EXPECT_NEAR(among[i] / among[0], (expected[some[i]] - 1) / (expected[some[0]] - 1),
                  1e-4 * (1 + among[i] / among[0]));
    }
  }
}

// A key with a weight gets the share of that many equal keys.
TEST(Attention, AKeyCountsForAllThatItStandsFor) {
  TestRandom random;
  for (int round = 0; round < 50; ++round) {
    const TestRows keys(random.Between(1, 20), random);
    const TestRows query(1, random);
    const LayerGeometry geometry = TestGeometry(random.OneIn(2) ? 0.0f : 2.0f);
    std::vector<float> weights;
    std::vector<std::byte> each_token;
    std::vector<std::uint64_t> key_of;
    const std::size_t row_bytes = geometry.head_dim * ElementBytes(geometry.type);
    for (std::uint64_t i = 0; i < keys.count(); ++i) {
      weights.push_back(static_cast<float>(random.Between(1, 9)));
      const std::byte* const row = keys.range().rows + i * row_bytes;
      for (float n = 0; n < weights.back(); ++n) {
        each_token.insert(each_token.end(), row, row + row_bytes);
        key_of.push_back(i);
      }
    }
    AttentionSums attention(ReferenceOperations(), geometry);
    std::vector<double> paid_each(key_of.size());
    attention.Add(
        {.rows = each_token.data(), .count = key_of.size()},
        {.queries = query.range(), .visible = FullRanges(1, key_of.size()), .sums = paid_each});
    std::vector<double> expected(keys.count());
    for (std::size_t token = 0; token < key_of.size(); ++token) {
      expected[key_of[token]] += paid_each[token];
    }
    std::vector<double> shares(keys.count());
    KeyObservation look = {.queries = query.range(),
                           .visible = FullRanges(1, keys.count()),
                           .log2_weights = Log2Weights(weights),
                           .sums = shares};
    attention.Add(keys.range(), look);
    EXPECT_THAT(shares, Pointwise(DoubleNear(1e-6), expected));

    std::vector<double> products(keys.count());
    look.logits = true;
    look.sums = products;
    attention.Add(keys.range(), look);
    std::vector<std::uint32_t> all(keys.count());
    std::iota(all.begin(), all.end(), 0u);
    std::vector<double> among(keys.count());
    AddSharesOfVisible({.products = products, .log2_weights = look.log2_weights}, all, geometry, 1,
                       among);
    EXPECT_THAT(among, Pointwise(DoubleNear(1e-6), expected));
  }
}

// Observes a part of the lane, with one of its keys as the query.
TEST(Attention, AKeyLooksAtAPartOfItsLane) {
  TestRandom random;
  const TestRows keys(20, random);
  const LayerGeometry geometry = TestGeometry();
  AttentionSums attention(ReferenceOperations(), geometry);
  std::vector<double> products(7, 1);
  const KeyObservation look = {.key = 3,
                               .first = 11,
                               .visible = {.begin = {1}, .end = {6}},
                               .logits = true,
                               .sums = products};
  ASSERT_EQ(ObservationProblem(look, 20), "");
  attention.Add(keys.range(), look);
  for (std::uint64_t i = 0; i < 7; ++i) {
    const bool seen = 1 <= i && i < 6;
    EXPECT_NEAR(products[i], 1 + (seen ? keys.Dot(3, keys, 11 + i) : 0), 1e-9) << i;
  }
}

TEST(Attention, LooksBeyondTheLaneAreNamed) {
  std::vector<double> sums(5);
  const KeyObservation good = {
      .queries = {.count = 2}, .first = 3, .visible = FullRanges(2, 5), .sums = sums};
  EXPECT_EQ(ObservationProblem(good, 8), "");
  EXPECT_NE(ObservationProblem(good, 7), "");
  EXPECT_NE(ObservationProblem(good, 2), "");
  KeyObservation bad = good;
  bad.visible.end[1] = 6;
  EXPECT_NE(ObservationProblem(bad, 8), "");
  bad = good;
  bad.queries.count = 3;
  EXPECT_NE(ObservationProblem(bad, 8), "");
  bad = good;
  bad.log2_weights = {1, 2, 3, 4};
  EXPECT_NE(ObservationProblem(bad, 8), "");
  bad = good;
  bad.visible = FullRanges(1, 5);
  bad.key = 7;
  EXPECT_EQ(ObservationProblem(bad, 8), "");
  bad.key = 8;
  EXPECT_NE(ObservationProblem(bad, 8), "");
}

TEST(Attention, NothingIsPaidWhereNothingIsSeen) {
  TestRandom random;
  const TestRows keys(3, random);
  const TestRows query(1, random);
  const LayerGeometry geometry = TestGeometry();
  AttentionSums attention(ReferenceOperations(), geometry);
  std::vector<double> sums(3);
  attention.Add(keys.range(),
                {.queries = query.range(), .visible = {.begin = {2}, .end = {2}}, .sums = sums});
  EXPECT_THAT(sums, ElementsAre(0, 0, 0));
  attention.Add({}, {.queries = query.range(), .visible = FullRanges(1, 0)});
  AddSharesOfVisible({}, {}, geometry, 1, {});
}

}  // namespace
}  // namespace tessera::kernels
