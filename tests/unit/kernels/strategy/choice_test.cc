// Which candidate a strategy selects.
#include <cmath>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/reference/attend_part.h"
#include "kernels/strategy/candidates.h"
#include "kernels/strategy/strategy.h"
#include "tests/unit/kernels/strategy/plain.h"
#include "tests/unit/kernels/strategy/rows.h"

namespace tessera::kernels {
namespace {

double Uniform(TestRandom& random, double low, double high) {
  return low + (high - low) * static_cast<double>(random.Below(1u << 30)) * 0x1p-30;
}

TEST(Choice, IsThatOfBruteForce) {
  TestRandom random;
  int compared = 0;
  std::vector<int> taken(2);  // outside and within the threshold
  for (int round = 0; round < 12; ++round) {
    // Folds with more rows than channels: eigenvectors of eigenvalue 0 would be arbitrary.
    const std::size_t count = random.Between(200, 700);
    const TestLane lane(PowerLaw(random, count, 64, Uniform(random, 0.5, 1.2)),
                        PowerLaw(random, count, 64, Uniform(random, 0.3, 0.9)), ElementType::kBf16);
    StrategyOptions options = {
        .threshold = {.key = Uniform(random, 0.02, 0.3), .value = Uniform(random, 0.05, 0.4)},
        .reorder = random.OneIn(2),
        .summary = random.OneIn(2) ? Summary::kNone : Summary::kMean,
        .rotation_type = random.OneIn(2) ? ElementType::kBf16 : ElementType::kFp32};
    const plain::Outcome expected = plain::Choose(lane.keys.all(), lane.values.all(), options);
    const Strategy strategy = lane.Make(options);
    // If the last two groups of a row are equally strong in fp32, a pairing may differ.
    if (expected.margin < 3e-3) continue;
    ++compared;
    ++taken[expected.within_threshold ? 1 : 0];
    SCOPED_TRACE(std::to_string(count) + " rows, reorder " + std::to_string(options.reorder));
    EXPECT_EQ(strategy.shape.key.kept, expected.kept);
    EXPECT_EQ(strategy.shape.group, expected.group);
    EXPECT_EQ(strategy.within_threshold, expected.within_threshold);
    EXPECT_NEAR(strategy.loss.key, expected.loss.key, 3e-3);
    EXPECT_NEAR(strategy.loss.value, expected.loss.value, 3e-3);
  }
  EXPECT_GE(compared, 4);
}

TEST(Choice, DoesNotDependOnTheImplementation) {
  TestRandom random;
  const TestLane lane(PowerLaw(random, 300, 64, 0.9), PowerLaw(random, 300, 64, 0.9),
                      ElementType::kBf16);
  const StrategyOptions options = {.threshold = {.key = 1, .value = 1}, .reorder = false};
  const auto make = [&](const Operations& operations) {
    Moments key(64);
    Moments value(64);
    key.Add(lane.keys.span(), operations);
    value.Add(lane.values.span(), operations);
    return MakeStrategy(lane.rows(), key, value, options, operations);
  };
  const Strategy expected = make(ReferenceOperations());
  const Strategy strategy = make(BestOperations());
  EXPECT_EQ(strategy.shape, expected.shape);
  EXPECT_NEAR(strategy.loss.key, expected.loss.key, 1e-3);
  EXPECT_NEAR(strategy.block_variance, expected.block_variance, 1e-5);
}

Candidate Made(std::uint16_t kept, std::uint8_t group, double bytes, double key, double value) {
  return {.shape = {.key = {128, kept}, .value = {128, kept}, .group = group},
          .bytes = bytes,
          .loss = {.key = key, .value = value}};
}

TEST(Choice, TakesTheFewestBytesAmongTheGoodEnough) {
  constexpr Loss kThreshold = {.key = 0.1, .value = 0.2};
  // Fewer bytes, but one of the losses is too large.
  EXPECT_EQ(ChooseCandidate({Made(16, 1, 80, 0.11, 0.1), Made(16, 4, 70, 0.1, 0.21),
                             Made(32, 2, 90, 0.1, 0.2), Made(48, 1, 99, 0.01, 0.02)},
                            kThreshold),
            2u);
  // Equal bytes: the larger group size.
  EXPECT_EQ(ChooseCandidate({Made(16, 1, 80, 0, 0), Made(20, 4, 80, 0, 0), Made(18, 2, 80, 0, 0)},
                            kThreshold),
            1u);
  // None fits: the largest share and the smallest group size, whatever the losses.
  EXPECT_EQ(ChooseCandidate({Made(48, 4, 99, 0.2, 0.2), Made(48, 1, 120, 0.3, 0.3),
                             Made(16, 1, 80, 0.2, 0.2), Made(48, 2, 105, 0.2, 0.2)},
                            kThreshold),
            1u);
}

TEST(Choice, CountsWhatIsPublished) {
  const TileShape shape = {.format = TileFormat::kPackedBf16,
                           .key = {128, 32},
                           .value = {128, 32},
                           .group = 1,
                           .summary = Summary::kMean,
                           .block = 8};
  EXPECT_EQ(BytesPerEntry(shape, ElementType::kBf16, 65536), 160 + 10 + 1);
  EXPECT_EQ(BytesPerEntry(shape, ElementType::kFp32, 65536), 160 + 10 + 2);
  // A single entry pays for a whole tile.
  EXPECT_EQ(BytesPerEntry(shape, ElementType::kBf16, 1), 32 * 170 + 65536);
  EXPECT_EQ(BytesPerEntry(DenseShape(128, ElementType::kBf16), ElementType::kBf16, 64), 512);
}

TEST(Choice, IsAmongAllSharesInAllGroups) {
  const StrategyOptions options = {.kept = {0.5, 0.25}, .groups = {4, 1}, .truncated = 0.25};
  const std::vector<Candidate> candidates = ListCandidates(64, 1000, 8, options);
  ASSERT_EQ(candidates.size(), 4u);
  for (std::size_t i = 0; i < 4; ++i) {
    const TileShape& shape = candidates[i].shape;
    EXPECT_EQ(UnsupportedReason(shape), nullptr);
    EXPECT_EQ(candidates[i].share, i / 2);
    EXPECT_EQ(shape.key.kept, i < 2 ? 32 : 16);
    EXPECT_EQ(shape.group, options.groups[i % 2]);
    EXPECT_EQ(shape.key.channels, 48);
    EXPECT_EQ(shape.block, 8);
    EXPECT_EQ(candidates[i].bytes, BytesPerEntry(shape, ElementType::kBf16, 1000));
  }
}

TEST(Choice, RoundsSharesDownToGroups) {
  EXPECT_EQ(KeptChannels(0.375, 1, 64, 64), 24u);
  EXPECT_EQ(KeptChannels(0.3, 1, 64, 64), 19u);
  EXPECT_EQ(KeptChannels(0.3, 2, 64, 64), 18u);
  EXPECT_EQ(KeptChannels(0.3, 4, 64, 64), 16u);
  EXPECT_EQ(KeptChannels(0.001, 4, 64, 64), 4u);
  EXPECT_EQ(KeptChannels(1, 4, 64, 48), 48u);
  EXPECT_EQ(KeptChannels(0.29, 1, 100, 100), 29u);  // 0.29 * 100 is less than 29 in double
  EXPECT_EQ(ChannelsLeft(0, 64), 64u);
  EXPECT_EQ(ChannelsLeft(0.25, 128), 96u);
  EXPECT_EQ(ChannelsLeft(0.3, 64), 44u);
  EXPECT_EQ(ChannelsLeft(0.28, 64), 44u);
  EXPECT_EQ(ChannelsLeft(0.999, 64), 4u);
}

}  // namespace
}  // namespace tessera::kernels
