#include "kernels/strategy/reorder.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "tests/unit/kernels/strategy/plain.h"
#include "tests/unit/kernels/strategy/rows.h"

namespace tessera::kernels {
namespace {

void ExpectPermutation(ChannelOrder order, std::uint32_t channels) {
  std::sort(order.begin(), order.end());
  ChannelOrder all(channels);
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(order, all);
}

Matrix Identity(std::uint32_t size) {
  Matrix identity(size, std::vector<double>(size));
  for (std::uint32_t i = 0; i < size; ++i) identity[i][i] = 1;
  return identity;
}

// The channel of each row of a permuted identity.
ChannelOrder OrderOf(const Matrix& permuted) {
  ChannelOrder order;
  for (const auto& row : permuted) {
    order.push_back(
        static_cast<std::uint16_t>(std::max_element(row.begin(), row.end()) - row.begin()));
  }
  return order;
}

TEST(Reorder, IsGreedyPairingTwice) {
  TestRandom random;
  for (int round = 0; round < 20; ++round) {
    const auto channels = static_cast<std::uint32_t>(random.Between(1, 16) * 4);
    const auto kept = static_cast<std::uint32_t>(random.Between(1, channels));
    // Few magnitudes in some rounds, so that ties occur.
    Matrix rows = Normal(random, random.Between(1, 60), channels);
    if (random.OneIn(2)) {
      for (auto& row : rows) {
        for (double& x : row) x = std::round(2 * x);
      }
    }
    const StoredRows stored(rows, ElementType::kFp32);
    KeptTogetherCounts together(channels);
    for (const auto& row : stored.all()) {
      together.Add(std::vector<float>(row.begin(), row.end()).data(), kept);
    }
    const ChannelOrder order = OrderByKeptTogether(together);
    ExpectPermutation(order, channels);
    EXPECT_EQ(order, OrderOf(plain::Reordered(Identity(channels), stored.all(), kept)))
        << kept << " of " << channels;
  }
}

// Channels 4i and 4i + 2 are strong in the same rows, and so are 4i + 1 and 4i + 3. Deviations fall
// fast enough that the eigenvectors are the channels.
Matrix PlantedPairs(TestRandom& random, std::size_t count, std::uint32_t channels) {
  std::vector<double> deviations;
  for (std::uint32_t c = 0; c < channels; ++c) deviations.push_back(std::pow(1.1, -double(c)));
  Matrix rows = Scaled(random, count, deviations);
  for (auto& row : rows) {
    for (std::uint32_t c = 0; c < channels; ++c) {
      if (c % 4 < 2 && !random.OneIn(3)) row[c] = row[c + 2] = 0;
    }
  }
  return rows;
}

TEST(Reorder, FindsPlantedPairs) {
  TestRandom random;
  const Matrix rows = PlantedPairs(random, 1000, 64);
  KeptTogetherCounts together(64);
  for (const auto& row : rows) {
    together.Add(std::vector<float>(row.begin(), row.end()).data(), 16);
  }
  const ChannelOrder order = OrderByKeptTogether(together);
  ExpectPermutation(order, 64);
  int found = 0;
  for (std::uint32_t c = 0; c < 32; c += 2) found += order[c + 1] - order[c] == 2 ? 1 : 0;
  EXPECT_GE(found, 12) << "of the 16 strongest pairs";
}

TEST(Reorder, LosesLessWhereChannelsComeInPairs) {
  TestRandom random;
  Loss with;  // as the strategies report it
  Loss without;
  Loss stored_with;  // with the stored rotations
  Loss stored_without;
  const auto add_to = [](Loss& sum, const Loss& loss) {
    sum.key += loss.key;
    sum.value += loss.value;
  };
  for (int round = 0; round < 4; ++round) {
    const TestLane lane(Mixed(random, PlantedPairs(random, 3000, 64)),
                        Mixed(random, PlantedPairs(random, 3000, 64)), ElementType::kBf16);
    // Pairs take fewer bytes.
    StrategyOptions options = {
        .kept = {0.125}, .groups = {1, 2}, .threshold = {.key = 1, .value = 1}};
    const auto add = [&](Loss& said, Loss& stored) {
      const Strategy strategy = lane.Make(options);
      EXPECT_EQ(strategy.shape.group, 2);
      add_to(said, strategy.loss);
      add_to(stored, LossUnder(lane.rows(), strategy.shape, strategy.view(), BestOperations()));
    };
    add(with, stored_with);
    options.reorder = false;
    add(without, stored_without);
  }
  EXPECT_LT(with.key, 0.95 * without.key);
  EXPECT_LT(with.value, 0.95 * without.value);
  EXPECT_LT(stored_with.key, 0.95 * stored_without.key);
  EXPECT_LT(stored_with.value, 0.95 * stored_without.value);
}

// With independent channels the counts are noise.
TEST(Reorder, NeverLosesMore) {
  TestRandom random;
  for (const std::uint32_t group : {2u, 4u}) {
    for (int round = 0; round < 5; ++round) {
      const TestLane lane(PowerLaw(random, 500, 64, 0.7), PowerLaw(random, 500, 64, 0.35),
                          ElementType::kBf16);
      StrategyOptions options = {.kept = {0.25}, .groups = {group}};
      const Strategy reordered = lane.Make(options);
      options.reorder = false;
      const Strategy plain = lane.Make(options);
      EXPECT_LE(reordered.loss.key, plain.loss.key);
      EXPECT_LE(reordered.loss.value, plain.loss.value);
    }
  }
}

}  // namespace
}  // namespace tessera::kernels
