#include "kernels/strategy/strategy.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/strategy/blocks.h"
#include "tests/unit/kernels/strategy/plain.h"
#include "tests/unit/kernels/strategy/rows.h"

namespace tessera::kernels {
namespace {

TestLane PowerLawLane(TestRandom& random, std::size_t rows, std::uint32_t head_dim) {
  return TestLane(PowerLaw(random, rows, head_dim, 0.7), PowerLaw(random, rows, head_dim, 0.35),
                  ElementType::kBf16);
}

TEST(Strategy, LosesNothingWhereAllChannelsAreKept) {
  TestRandom random;
  for (const std::uint32_t head_dim : kHeadDims) {
    const TestLane lane = PowerLawLane(random, 300, head_dim);
    for (const ElementType type : {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32}) {
      const Strategy strategy =
          lane.Make({.kept = {1}, .groups = {4}, .threshold = {}, .rotation_type = type});
      EXPECT_EQ(strategy.shape.key.kept, head_dim);
      const double rounding = type == ElementType::kBf16   ? 2e-3
                              : type == ElementType::kFp16 ? 3e-4
                                                           : 1e-5;
      EXPECT_NEAR(strategy.loss.key, 0, rounding);
      EXPECT_NEAR(strategy.loss.value, 0, rounding);
    }
  }
}

TEST(Strategy, LossFallsWithTheShareAndRisesWithTheGroup) {
  TestRandom random;
  for (const std::uint32_t head_dim : {64u, 128u}) {
    const TestLane lane = PowerLawLane(random, 400, head_dim);
    for (const bool reorder : {false, true}) {
      double of_less = 1;
      for (const double share : {0.125, 0.25, 0.375, 0.75}) {
        double of_smaller = 0;
        for (const std::uint32_t group : {1u, 2u, 4u}) {
          const Strategy strategy =
              lane.Make({.kept = {share}, .groups = {group}, .reorder = reorder});
          EXPECT_GT(strategy.loss.key, of_smaller) << share << " in groups of " << group;
          of_smaller = strategy.loss.key;
          if (group == 1) {
            EXPECT_LT(strategy.loss.key, of_less);
            of_less = strategy.loss.key;
          }
        }
      }
    }
  }
}

TEST(Strategy, KeepsLittleOfRowsOfLowRank) {
  TestRandom random;
  std::vector<double> deviations(64);
  std::fill_n(deviations.begin(), 8, 1.0);
  const TestLane lane(Mixed(random, Scaled(random, 500, deviations)),
                      Mixed(random, Scaled(random, 500, deviations)), ElementType::kBf16);
  const Strategy strategy = lane.Make({.threshold = {.key = 0.01, .value = 0.01}});
  EXPECT_TRUE(strategy.within_threshold);
  EXPECT_EQ(strategy.shape.key.kept, 8);
  EXPECT_EQ(strategy.shape.group, 4);
  EXPECT_NEAR(strategy.loss.key, 0, 3e-3);  // error from rounding R to bf16
  EXPECT_NEAR(strategy.loss.value, 0, 3e-3);
}

TEST(Strategy, IsJudgedOnRowsThatItWasNotMadeFrom) {
  TestRandom random;
  const TestLane lane(Normal(random, 256, 128), Normal(random, 256, 128), ElementType::kBf16);
  const Strategy strategy = lane.Make({.kept = {0.25}, .groups = {1}});
  const Loss in_sample = LossUnder(lane.rows(), strategy.shape, strategy.view(), BestOperations());
  EXPECT_GT(strategy.loss.key, in_sample.key + 0.03);
  EXPECT_GT(strategy.loss.value, in_sample.value + 0.03);
  // The reported loss also holds for new rows. (On white noise all rotations lose the same.)
  const TestLane fresh(Normal(random, 2000, 128), Normal(random, 2000, 128), ElementType::kBf16);
  const Loss of_fresh = LossUnder(fresh.rows(), strategy.shape, strategy.view(), BestOperations());
  EXPECT_NEAR(strategy.loss.key, of_fresh.key, 0.02);
  EXPECT_NEAR(strategy.loss.value, of_fresh.value, 0.02);
}

TEST(Strategy, LooksAtNoMoreRowsThanItMay) {
  TestRandom random;
  // The odd tiles are judged. Of these eight tiles, two evenly spaced samples are 5 and 13, and one
  // is 9.
  Matrix rows = PowerLaw(random, 512, 64, 0.7);
  for (std::size_t r = 0; r < rows.size(); ++r) {
    const std::size_t tile = r / 32;
    if (tile % 2 == 1) std::fill(rows[r].begin(), rows[r].end(), 0.0);
    if (tile == 5 || tile == 13) rows[r][random.Below(64)] = 1;
  }
  const TestLane lane(rows, rows, ElementType::kBf16);
  StrategyOptions options = {.kept = {0.125}, .groups = {1}, .sampled_rows = 95};
  EXPECT_GT(lane.Make(options).loss.key, 0.1);  // tiles 5 and 13
  options.sampled_rows = 63;
  EXPECT_EQ(lane.Make(options).loss.key, 0);  // tile 9
}

TEST(Strategy, CutsTheWeakestChannelsOff) {
  TestRandom random;
  for (const std::uint32_t head_dim : kHeadDims) {
    const TestLane lane = PowerLawLane(random, 600, head_dim);
    const StrategyOptions options = {.kept = {1},
                                     .groups = {4},
                                     .truncated = 0.25,
                                     .reorder = false,
                                     .rotation_type = ElementType::kFp32};
    const Strategy strategy = lane.Make(options);
    EXPECT_EQ(strategy.shape.key.channels, head_dim / 4 * 3);
    EXPECT_EQ(strategy.shape.key.kept, head_dim / 4 * 3);
    EXPECT_EQ(UnsupportedReason(strategy.shape), nullptr);
    // The total loss equals the share of energy in the weakest eigenvalues.
    if (head_dim != 64) continue;
    std::vector<double> values;
    const Matrix vectors = plain::Eigenvectors(plain::SecondMoments(lane.keys.all()), &values);
    double lost = 0;
    double all = 0;
    for (const auto& row : lane.keys.all()) {
      const std::vector<double> rotated = plain::Rotate(vectors, row);
      for (std::uint32_t c = 0; c < 64; ++c) {
        all += rotated[c] * rotated[c];
        lost += c >= 48 ? rotated[c] * rotated[c] : 0;
      }
    }
    double weakest = 0;
    for (std::uint32_t c = 48; c < 64; ++c) weakest += values[c];
    EXPECT_NEAR(lost, weakest, 1e-6 * all);
    const Loss loss = LossUnder(lane.rows(), strategy.shape, strategy.view(), BestOperations());
    const Matrix strongest(vectors.begin(), vectors.begin() + 48);
    EXPECT_NEAR(loss.key, plain::MeanLoss(strongest, lane.keys.all(), 48, 4), 1e-4);
  }
}

TEST(Strategy, StoresAnOrthogonalMatrixOfTheEigenvectors) {
  TestRandom random;
  const TestLane lane = PowerLawLane(random, 500, 64);
  const Strategy strategy =
      lane.Make({.kept = {0.25}, .groups = {4}, .rotation_type = ElementType::kFp32});
  const RotationView view = strategy.view();
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(view.key) % 64, 0u);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(view.value) % 64, 0u);
  const auto* const key = reinterpret_cast<const float*>(view.key);
  const Matrix vectors = plain::Eigenvectors(plain::SecondMoments(lane.keys.all()));
  std::vector<bool> seen(64);
  for (std::uint32_t a = 0; a < 64; ++a) {
    for (std::uint32_t b = a; b < 64; ++b) {
      double dot = 0;
      for (std::uint32_t d = 0; d < 64; ++d) dot += double{key[a * 64 + d]} * key[b * 64 + d];
      ASSERT_NEAR(dot, a == b ? 1 : 0, 1e-5);
    }
    for (std::uint32_t v = 0; v < 64; ++v) {
      double dot = 0;
      for (std::uint32_t d = 0; d < 64; ++d) dot += key[a * 64 + d] * vectors[v][d];
      if (dot > 0.9) seen[v] = true;
    }
  }
  EXPECT_GE(std::count(seen.begin(), seen.end(), true), 60) << "each vector once, but for mixtures";
}

Matrix RepeatedKeys(TestRandom& random, std::size_t each) {
  Matrix rows;
  for (const auto& row : Normal(random, 40, 64)) rows.insert(rows.end(), each, row);
  return rows;
}

TEST(Block, IsAsLongAsKeysAreAlike) {
  TestRandom random;
  const StrategyOptions options = {.kept = {0.25}};
  const auto block_of = [&](const Matrix& keys, const StrategyOptions& with) {
    const TestLane lane(keys, keys, ElementType::kBf16);
    return lane.Make(with);
  };
  const Strategy alike = block_of(RepeatedKeys(random, 16), options);
  EXPECT_EQ(alike.shape.block, 16);
  EXPECT_NEAR(alike.block_variance, 0, 1e-6);
  // Runs of 8 equal keys: a block of 16 holds two unrelated keys, whose mean has about half the
  // energy of each.
  const StrategyOptions strict = {.kept = {0.25}, .block_variance = 0.2};
  const Strategy eights = block_of(RepeatedKeys(random, 8), strict);
  EXPECT_EQ(eights.shape.block, 8);
  EXPECT_EQ(block_of(RepeatedKeys(random, 4), strict).shape.block, 4);
  // Unrelated keys: no block size is good enough, so the smallest is used; |mean|^2 is a quarter of
  // |k|^2.
  const Strategy unrelated = block_of(Normal(random, 600, 64), options);
  EXPECT_EQ(unrelated.shape.block, 4);
  EXPECT_NEAR(unrelated.block_variance, 0.75, 0.02);
  const StrategyOptions without = {.summary = Summary::kNone};
  const StrategyOptions empty = {.blocks = {}};
  for (const StrategyOptions& none : {without, empty}) {
    const Strategy strategy = block_of(Normal(random, 600, 64), none);
    EXPECT_EQ(strategy.shape.block, 0);
    EXPECT_EQ(strategy.shape.summary, Summary::kNone);
    EXPECT_EQ(strategy.block_variance, 0);
  }
  EXPECT_EQ(block_of(Normal(random, 50, 64), {.blocks = {16, 8}}).shape.block, 8);
}

TEST(Block, VarianceIsThatOfItsDefinition) {
  TestRandom random;
  for (const std::uint32_t block : {4u, 8u, 16u}) {
    const StoredRows keys(PowerLaw(random, random.Between(1, 150), 64, 0.7), ElementType::kFp16);
    const Matrix rows = keys.all();
    double sum = 0;
    int blocks = 0;
    for (std::size_t first = 0; first < rows.size(); first += block, ++blocks) {
      const std::size_t end = std::min(rows.size(), first + block);
      double around_mean = 0;
      double energy = 0;
      for (std::size_t d = 0; d < 64; ++d) {
        double mean = 0;
        for (std::size_t r = first; r < end; ++r) mean += rows[r][d];
        mean /= static_cast<double>(end - first);
        for (std::size_t r = first; r < end; ++r) {
          around_mean += (rows[r][d] - mean) * (rows[r][d] - mean);
          energy += rows[r][d] * rows[r][d];
        }
      }
      sum += around_mean / energy;
    }
    EXPECT_NEAR(BlockVariance(keys.span(), block, 4096, BestOperations()), sum / blocks, 1e-6);
  }
}

}  // namespace
}  // namespace tessera::kernels
