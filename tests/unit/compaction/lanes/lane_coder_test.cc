#include "daemon/compaction/lanes/lane_coder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/unit/compaction/compaction_fixture.h"

namespace tessera::compaction {
namespace {

class LaneCoderTest : public CompactionFixture {
 protected:
  LaneCoderTest() { model_ = world_.Register(cache::SmallModel("one", 1, 1)); }

  LaneCoder::Options Options(const Track& track, const policies::Policy& policy, LaneState& state) {
    return {.memory = &track.sequence->memory(),
            .model = model_.get(),
            .policy = &policy,
            .state = &state,
            .operations = &kernels::OperationsOf(kernels::BestImplementation()),
            .counters = &counters_};
  }
  // No other job uses the sequence's only lane.
  absl::Status Encode(const Track& track, const policies::Policy& policy, LaneState& state,
                      bool* wants_seal = nullptr) {
    return track.sequence->Recode({.lane = 0}, [&](const cache::OpenRun& run) {
      LaneCoder coder(Options(track, policy, state), run);
      LaneCoder::Swap swap = coder.EncodeTiles();
      if (wants_seal != nullptr) *wants_seal = coder.wants_seal();
      return swap;
    });
  }
  absl::Status Seal(const Track& track, const policies::Policy& policy, LaneState& state,
                    const SealRequest& cut) {
    return track.sequence->Recode({.lane = 0}, [&](const cache::OpenRun& run) {
      return LaneCoder(Options(track, policy, state), run).Seal(cut);
    });
  }
  // A new sequence without a policy.
  Track Empty() { return {world_.NewSequence(worker_->session(), *model_), {}, std::nullopt}; }
  static std::vector<std::byte> RowsOf(const Stamps& stamps, cache::RowKind kind) {
    std::vector<std::byte> rows(stamps.size() * kTile.row_bytes());
    for (std::size_t i = 0; i < stamps.size(); ++i) {
      DrawRow(stamps[i], {0, 0, kind}, kTile, rows.data() + i * kTile.row_bytes());
    }
    return rows;
  }

  static constexpr kernels::DenseTile kTile = {.head_dim = 64, .type = kernels::ElementType::kBf16};
  CodingCounters counters_;
};

// Whether moments were summed tile by tile or computed when needed.
TEST_F(LaneCoderTest, AStrategyIsTheSameHoweverTheRunCame) {
  const policies::Policy policy = SmallMosaic();
  const Stamps prompt = DrawTokens(100, 1);
  const Stamps decoded = DrawTokens(160, 2);
  const Stamps rest = DrawTokens(60, 3);
  std::vector<cache::SequenceView> views;
  std::vector<Track> tracks;
  for (const std::size_t at_once : {32, 160}) {
    Track track = Empty();
    LaneState state;
    AppendStamps(track, prompt);
    ASSERT_TRUE(Seal(track, policy, state, SealRequest::Everything()).ok());
    for (std::size_t done = 0; done < decoded.size(); done += at_once) {
      AppendStamps(track, Stamps(decoded.begin() + static_cast<std::ptrdiff_t>(done),
                                 decoded.begin() + static_cast<std::ptrdiff_t>(done + at_once)));
      ASSERT_TRUE(Encode(track, policy, state).ok());
    }
    ASSERT_EQ(FormsOf(track), (Forms{"16 kept: 100", "16 kept: 160"}));
    AppendStamps(track, rest);
    LaneState anew;
    ASSERT_TRUE(Seal(track, policy, at_once == 32 ? state : anew, SealRequest::Everything()).ok());
    ASSERT_EQ(FormsOf(track), (Forms{"16 kept: 100", "16 kept: 220"}));
    EXPECT_EQ(Shown(track), "");
    views.push_back(View(track));
    tracks.push_back(std::move(track));
  }
  for (std::size_t s = 0; s < 2; ++s) {
    const kernels::SegmentView& one = views[0].segments[s];
    const kernels::SegmentView& other = views[1].segments[s];
    ASSERT_EQ(one.shape, other.shape);
    const std::uint64_t bytes = kernels::RotationBytes(one.shape, one.shape.key, one.rotation.type);
    EXPECT_EQ(std::memcmp(one.rotation.key, other.rotation.key, bytes), 0);
    EXPECT_EQ(std::memcmp(one.rotation.value, other.rotation.value, bytes), 0);
  }
  EXPECT_NE(views[0].segments[0].rotation.key, views[1].segments[0].rotation.key);
}

// Repeats the decision from the rows and from the strategy that readers see.
TEST_F(LaneCoderTest, ARunIsCutWhenItsNewestRowsLoseMoreThanTheStrategyMay) {
  const kernels::Operations& operations = kernels::OperationsOf(kernels::BestImplementation());
  int cuts = 0;
  for (int round = 0; round < 20; ++round) {
    policies::Policy policy = SmallMosaic();
    policies::SegmentOptions& segments = policy.mosaic->segments;
    segments.loss_window = 32 * random_.Between(1, 4);
    segments.margin = {.key = 0.1 * static_cast<double>(random_.Below(5)),
                       .value = 0.1 * static_cast<double>(random_.Below(5))};
    Track track = Empty();
    LaneState state;
    Append(track, 256, 1);
    const Stamps prompt = track.stamps;
    ASSERT_TRUE(Seal(track, policy, state, SealRequest::Everything()).ok());
    const cache::SequenceView sealed = View(track);
    // Recomputes the strategy's loss on its own rows.
    const std::vector<std::byte> keys = RowsOf(prompt, cache::RowKind::kKey);
    const std::vector<std::byte> values = RowsOf(prompt, cache::RowKind::kValue);
    const kernels::LaneRows rows = {.keys = {keys.data(), 256, 64, kTile.type},
                                    .values = {values.data(), 256, 64, kTile.type}};
    kernels::Moments key(64), value(64);
    key.Add(rows.keys, operations);
    value.Add(rows.values, operations);
    const kernels::StrategyOptions& options = policy.mosaic->strategy;
    const kernels::Loss own = kernels::MakeStrategy(rows, key, value, options, operations).loss;
    const double most_key = std::max(own.key, options.threshold.key) + segments.margin.key;
    const double most_value = std::max(own.value, options.threshold.value) + segments.margin.value;

    std::vector<kernels::Loss> losses;
    for (int tile = 1; tile < 8; ++tile) {
      const Stamps stamps = DrawTokens(32, random_.OneIn(2) ? 1 : 2);
      const std::vector<std::byte> new_keys = RowsOf(stamps, cache::RowKind::kKey);
      const std::vector<std::byte> new_values = RowsOf(stamps, cache::RowKind::kValue);
      losses.push_back(kernels::LossUnder({.keys = {new_keys.data(), 32, 64, kTile.type},
                                           .values = {new_values.data(), 32, 64, kTile.type}},
                                          sealed.segments[0].shape, sealed.segments[0].rotation,
                                          operations));
      AppendStamps(track, stamps);
      bool wants_seal = false;
      ASSERT_TRUE(Encode(track, policy, state, &wants_seal).ok());
      kernels::Loss mean;
      const std::size_t window = std::min<std::size_t>(losses.size(), segments.loss_window / 32);
      for (std::size_t i = losses.size() - window; i < losses.size(); ++i) {
        mean.key += losses[i].key / static_cast<double>(window);
        mean.value += losses[i].value / static_cast<double>(window);
      }
      // Stored values are rounded.
      constexpr double kRounding = 0.01;
      if (std::abs(mean.key - most_key) < kRounding ||
          std::abs(mean.value - most_value) < kRounding) {
        continue;
      }
      const bool too_much = mean.key > most_key || mean.value > most_value;
      const bool long_enough = static_cast<std::uint64_t>(32 * tile) >= segments.min_tokens;
      ASSERT_EQ(wants_seal, too_much && long_enough)
          << "tile " << tile << " loses " << mean.key << " and " << mean.value << " of " << most_key
          << " and " << most_value;
      cuts += wants_seal ? 1 : 0;
    }
  }
  EXPECT_GT(cuts, 0);
}

TEST_F(LaneCoderTest, RawRowsThatGoMeanwhileAskForAnotherTry) {
  const policies::Policy policy = SmallMosaic();
  Track track = Empty();
  LaneState state;
  Append(track, 256, 1);
  ASSERT_TRUE(Seal(track, policy, state, SealRequest::Everything()).ok());
  Append(track, 64, 1);
  ASSERT_TRUE(Encode(track, policy, state).ok());
  Append(track, 64, 1);
  const absl::Status status = track.sequence->Recode({.lane = 0}, [&](const cache::OpenRun& run) {
    LaneCoder coder(Options(track, policy, state), run);
    run.provisional.front().segment->raw()->Drop();
    return coder.Seal({.decoded_before = ~std::uint64_t{0}});
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  ASSERT_TRUE(Seal(track, policy, state, {.decoded_before = ~std::uint64_t{0}}).ok());
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 256", "16 kept: 64", "16 kept: 64"}));
  EXPECT_EQ(Shown(track), "");
  EXPECT_EQ(RawBytes(), 0u);
}

TEST_F(LaneCoderTest, ASegmentMayHaveNoMinimum) {
  policies::Policy policy = SmallMosaic();
  policy.mosaic->segments.min_tokens = 0;
  Track track = Empty();
  LaneState state;
  Append(track, 40, 1);
  ASSERT_TRUE(Seal(track, policy, state, {.decoded_before = ~std::uint64_t{0}}).ok());
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 32", "plain: 8"}));
  ASSERT_TRUE(Seal(track, policy, state, {.decoded_before = ~std::uint64_t{0}}).ok());
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 32", "plain: 8"}));
  EXPECT_EQ(Shown(track), "");
}

}  // namespace
}  // namespace tessera::compaction
