// The best of many scores, smoothed scores, and counts from shares.
#include "kernels/tokens/top.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "kernels/tokens/counts.h"
#include "kernels/tokens/pool.h"
#include "tests/fakes/seed.h"

namespace tessera::kernels {
namespace {

using testing::DoubleNear;
using testing::ElementsAre;
using testing::Pointwise;

TEST(Top, IsWhatAStableSortPutsFirst) {
  TestRandom random;
  for (int round = 0; round < 500; ++round) {
    std::vector<double> scores(random.Below(60));
    for (double& score : scores)
      score = static_cast<double>(random.Below(random.OneIn(2) ? 5 : 1000));
    const std::uint64_t count = random.Below(scores.size() + 3);
    std::vector<std::uint32_t> all(scores.size());
    std::iota(all.begin(), all.end(), 0u);
    std::ranges::stable_sort(all, [&](auto a, auto b) { return scores[a] > scores[b]; });
    EXPECT_EQ(ByFallingScore(scores), all);
    all.resize(std::min<std::size_t>(all.size(), count));
    std::ranges::sort(all);
    EXPECT_EQ(TopIndices(scores, count), all);
  }
}

TEST(Top, NanIsLessThanAnyNumber) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const std::vector<double> scores = {kNan, -1, kInfinity, kNan, -5};
  EXPECT_THAT(TopIndices(scores, 3), ElementsAre(1, 2, 4));
  EXPECT_THAT(TopIndices(scores, 4), ElementsAre(0, 1, 2, 4));
  EXPECT_THAT(ByFallingScore(scores), ElementsAre(2, 1, 4, 0, 3));
}

TEST(Pool, ZerosStandBeyondTheEnds) {
  const std::vector<double> scores = {6, 0, 3, -9, 3};
  EXPECT_THAT(AveragePool(scores, 3), Pointwise(DoubleNear(1e-12), {2., 3., -2., -1., -2.}));
  EXPECT_THAT(LargestPool(scores, 3), ElementsAre(6, 6, 3, 3, 3));
  EXPECT_THAT(AveragePool(scores, 1), ElementsAre(6, 0, 3, -9, 3));
  EXPECT_THAT(LargestPool(std::vector<double>{-2, -3}, 15), ElementsAre(-2, -2));
  EXPECT_THAT(AveragePool(std::vector<double>{10}, 5), ElementsAre(2));
  EXPECT_THAT(AveragePool(std::vector<double>{}, 5), ElementsAre());
}

TEST(Counts, RoundingErrorsDoNotCount) {
  EXPECT_EQ(CountUp(0.01 * 100), 1u);
  EXPECT_EQ(CountUp(1.0000001), 1u);
  EXPECT_EQ(CountUp(1.00001), 2u);
  EXPECT_EQ(CountUp(-3), 0u);
  EXPECT_EQ(CountDown(0.29 * 100), 29u);  // 28.999999999999996
  EXPECT_EQ(CountDown(1.99), 1u);
  EXPECT_EQ(CountDown(-0.5), 0u);
}

TEST(Counts, AShareIsNoMoreOfTheMost) {
  EXPECT_EQ(MostForShare(42, 0.01), 4200u);
  EXPECT_EQ(MostForShare(0, 0.01), 0u);
  EXPECT_EQ(MostForShare(7, 1), 7u);
  EXPECT_EQ(MostForShare(7, 0), ~std::uint64_t{0});
  EXPECT_EQ(MostForShare(~std::uint64_t{0}, 0.01), ~std::uint64_t{0});
  for (std::uint64_t count = 0; count < 3000; ++count) {
    for (const double share : {0.001, 0.007, 0.01, 0.03, 0.1, 0.29, 1.0 / 3, 0.7, 0.999, 1e-9}) {
      const std::uint64_t most = MostForShare(count, share);
      ASSERT_LE(CountUp(share * static_cast<double>(most)), count) << count << " " << share;
      ASSERT_GT(CountUp(share * static_cast<double>(most + 1)), count) << count << " " << share;
    }
  }
}

}  // namespace
}  // namespace tessera::kernels
