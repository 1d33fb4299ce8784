#include "client/bench/measure/attention_judge.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "client/bench/workload/generated_kv.h"
#include "client/bench/workload/kept_rows.h"
#include "gtest/gtest.h"
#include "tests/fakes/seed.h"

namespace tessera::cli::bench {
namespace {

GeneratedKv SmallKv(TestRandom& random) {
  GeneratedShape shape;
  shape.kv_heads = 1;
  shape.head_dim = random.OneIn(2) ? 64 : 128;
  shape.tokens = 2048 + 8;  // partial last tile
  return GeneratedKv(shape, random.Bits());
}

TEST(AttentionJudge, EverythingKeptIsNoErrorAndAllMass) {
  TestRandom random;
  const GeneratedKv kv = SmallKv(random);
  const kernels::LaneRows rows = kv.Rows(0);
  const std::uint32_t dim = kv.shape().head_dim;
  const FloatLane lane = Widen(rows);
  const kernels::RowShape whole = {static_cast<std::uint16_t>(dim),
                                   static_cast<std::uint16_t>(dim)};
  const kernels::TileShape all = {.format = kernels::TileFormat::kPackedBf16,
                                  .head_dim = static_cast<std::uint16_t>(dim),
                                  .key = whole,
                                  .value = whole};
  const absl::StatusOr<KeptRows> packed = ThroughTiles(rows, all, {});
  ASSERT_TRUE(packed.ok());
  const KeptRows masked = ThroughMask(rows, dim, {});
  const std::vector<std::uint8_t> taken(lane.tokens(), 1);
  for (std::uint32_t i = 0; i < 8; ++i) {
    const GeneratedQuery query = kv.Query(0, i % kv.shape().group, i);
    const Attention truth = Attend(query.row, lane);
    for (const Attention& answer :
         {truth, Attend(query.row, lane, taken), Attend(query.row, packed->lane),
          Attend(query.row, masked.lane)}) {
      const Fidelity fidelity = Compare(answer, truth);
      EXPECT_EQ(fidelity.error, 0);
      EXPECT_NEAR(fidelity.kept_mass, 1, 1e-9);
    }
  }
}

// Two keys whose logits for a query differ by ln 3: weights 3/4 and 1/4.
TEST(AttentionJudge, IsAttentionByItsDefinition) {
  FloatLane lane = {
      .head_dim = 64, .keys = std::vector<float>(128), .values = std::vector<float>(128)};
  std::vector<std::uint16_t> query(64);
  query[5] = kernels::FloatToBf16(8);  // 8 / sqrt(64) = 1
  lane.keys[5] = std::log(3.0f);
  lane.values[0] = 1;
  lane.values[64 + 1] = 1;
  const Attention truth = Attend(query, lane);
  EXPECT_NEAR(truth.weights[0], 0.75, 1e-6);
  EXPECT_NEAR(truth.weights[1], 0.25, 1e-6);
  EXPECT_NEAR(truth.output[0], 0.75, 1e-6);
  EXPECT_NEAR(truth.output[1], 0.25, 1e-6);

  // Only the second key is read: a quarter of the mass, and the output is (0, 1).
  const std::vector<std::uint8_t> taken = {0, 1};
  const Fidelity second = Compare(Attend(query, lane, taken), truth);
  EXPECT_NEAR(second.kept_mass, 0.25, 1e-6);
  EXPECT_NEAR(second.error, std::sqrt(2 * 0.75 * 0.75) / std::sqrt(0.625), 1e-6);

  // The first key is lost: both weigh the same, so half of the first one's three quarters is
  // preserved.
  lane.keys[5] = 0;
  EXPECT_NEAR(Compare(Attend(query, lane), truth).kept_mass, 0.75, 1e-6);
}

TEST(KeptRows, AMaskKeepsTheStrongestChannelsAndNoOthers) {
  TestRandom random;
  const GeneratedKv kv = SmallKv(random);
  const kernels::LaneRows rows = kv.Rows(0);
  const std::uint32_t dim = kv.shape().head_dim;
  const FloatLane all = Widen(rows);
  const auto channels = static_cast<std::uint32_t>(random.Between(1, dim - 1));
  const FloatLane kept = ThroughMask(rows, channels, {}).lane;
  std::vector<double> moments(dim);
  std::vector<bool> is_kept(dim);
  for (std::size_t i = 0; i < all.keys.size(); ++i) {
    moments[i % dim] += double{all.keys[i]} * double{all.keys[i]};
    if (kept.keys[i] == 0) continue;
    is_kept[i % dim] = true;
    EXPECT_EQ(kept.keys[i], all.keys[i]);
  }
  EXPECT_EQ(std::count(is_kept.begin(), is_kept.end(), true), channels);
  double least_kept = 1e300;
  double most_dropped = 0;
  for (std::uint32_t c = 0; c < dim; ++c) {
    if (is_kept[c]) least_kept = std::min(least_kept, moments[c]);
    if (!is_kept[c]) most_dropped = std::max(most_dropped, moments[c]);
  }
  EXPECT_GE(least_kept, most_dropped);
}

TEST(KeptRows, MasksFillTheirBytesAndNotMore) {
  TestRandom random;
  const GeneratedKv kv = SmallKv(random);
  const kernels::LaneRows rows = kv.Rows(0);
  const kernels::Strategy strategy = StrategyFor(rows, FixedOptions(0.25, 1));
  const absl::StatusOr<KeptRows> packed = ThroughTiles(rows, strategy.shape, strategy.view());
  ASSERT_TRUE(packed.ok());
  for (const bool rotated : {false, true}) {
    const kernels::RotationView rotation = rotated ? strategy.view() : kernels::RotationView{};
    const std::uint32_t channels = ChannelsWithin(packed->bytes, rows, rotated);
    EXPECT_LE(ThroughMask(rows, channels, rotation).bytes, packed->bytes);
    EXPECT_GT(ThroughMask(rows, channels + 1, rotation).bytes, packed->bytes);
  }
}

TEST(EveryOtherTile, AreAllRowsOnce) {
  TestRandom random;
  const GeneratedKv kv = SmallKv(random);
  const FloatLane all = Widen(kv.Rows(0));
  const FloatLane even = Widen(EveryOtherTile(kv.Rows(0), false).rows());
  const FloatLane odd = Widen(EveryOtherTile(kv.Rows(0), true).rows());
  ASSERT_EQ(even.tokens() + odd.tokens(), all.tokens());
  const std::uint32_t dim = kv.shape().head_dim;
  for (std::uint64_t t = 0; t < all.tokens(); ++t) {
    const FloatLane& from = t / 32 % 2 == 0 ? even : odd;
    const std::uint64_t row = t / 64 * 32 + t % 32;
    EXPECT_EQ(from.keys[row * dim], all.keys[t * dim]);
    EXPECT_EQ(from.values[row * dim + 1], all.values[t * dim + 1]);
  }
}

}  // namespace
}  // namespace tessera::cli::bench
