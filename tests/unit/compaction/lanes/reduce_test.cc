// Sealed segments that are re-encoded with fewer channels when memory is short.

#include <memory>
#include <numeric>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/compaction/compactor_fixture.h"

namespace tessera::compaction {
namespace {

using testing::ElementsAre;

constexpr std::uint64_t kAll = ~std::uint64_t{0};

policies::Policy Pressed() {
  policies::Policy policy = SmallMosaic();
  policy.mosaic->pressed = 0.125;
  return policy;
}

class ThinTest : public CompactorTest {
 protected:
  ThinTest() { thinned_from_ = 16; }  // of 64 channels
  Track Sealed(const policies::Policy& policy, std::uint64_t tokens = 600) {
    Track track = NewTrack(policy);
    Append(track, tokens, 1, /*end_of_prompt=*/true);
    RunAll();
    return track;
  }
};

TEST_F(ThinTest, RowsKeepLessAndTheMemoryIsThere) {
  Track track = Sealed(Pressed());
  EXPECT_THAT(FormsOf(track), ElementsAre("16 kept: 256", "16 kept: 256", "16 kept: 88"));
  EXPECT_FALSE(track.sequence->has_manual_changes());
  const std::uint64_t before = track.sequence->Describe(false).tile_bytes;
  const Compactor::ReduceOutcome outcome = compactor_.Thin(*track.sequence, kAll);
  EXPECT_TRUE(outcome.hindrance.ok()) << outcome.hindrance;
  EXPECT_EQ(outcome.gained.segments, 3u * model_->lanes());
  EXPECT_THAT(FormsOf(track), ElementsAre("8 kept: 256", "8 kept: 256", "8 kept: 88"));
  EXPECT_EQ(track.sequence->Describe(false).tile_bytes, before - outcome.gained.bytes);
  EXPECT_EQ(Shown(track), "");
  EXPECT_TRUE(track.sequence->has_manual_changes());  // cannot be published
  // Reduced only once.
  EXPECT_EQ(compactor_.Thin(*track.sequence, kAll).gained.segments, 0u);
  // It continues as usual.
  Decode(track, 200, 2);
  RunAll();
  EXPECT_EQ(Shown(track), "");
}

TEST_F(ThinTest, TheOldestFirstAndNoMoreThanIsWanted) {
  Track track = Sealed(Pressed());
  const Compactor::ReduceOutcome one = compactor_.Thin(*track.sequence, 1);
  EXPECT_EQ(one.gained.segments, 1u);
  EXPECT_GT(one.gained.bytes, 0u);
  EXPECT_THAT(FormsOf(track), ElementsAre("8 kept: 256", "16 kept: 256", "16 kept: 88"));
  EXPECT_EQ(Shown(track), "");
}

TEST_F(ThinTest, OnlyWherethePolicySaysSo) {
  Track track = Sealed(SmallMosaic());
  EXPECT_EQ(compactor_.Thin(*track.sequence, kAll).gained.segments, 0u);
  Track quest = Sealed(Quest());
  EXPECT_EQ(compactor_.Thin(*quest.sequence, kAll).gained.segments, 0u);
  EXPECT_FALSE(track.sequence->has_manual_changes());
}

TEST_F(ThinTest, WhatIsSharedStays) {
  Track track = Sealed(Pressed());
  Track fork = Fork(track);
  EXPECT_EQ(compactor_.Thin(*track.sequence, kAll).gained.segments, 0u);
  EXPECT_EQ(compactor_.Thin(*fork.sequence, kAll).gained.segments, 0u);
  Append(fork, 300, 1, true);
  RunAll();
  const Compactor::ReduceOutcome own = compactor_.Thin(*fork.sequence, kAll);
  EXPECT_EQ(own.gained.segments, 2u * model_->lanes());
  EXPECT_EQ(Shown(track), "");
  EXPECT_EQ(Shown(fork), "");
  ASSERT_TRUE(world_.tenant().FreeSequence(fork.sequence->id()).ok());
  Collect();
  EXPECT_EQ(compactor_.Thin(*track.sequence, kAll).gained.segments, 3u * model_->lanes());
  EXPECT_EQ(Shown(track), "");
}

TEST_F(ThinTest, RowsThatWaitForAStrategyAreLeftAlone) {
  Track track = Sealed(Pressed(), 256);
  Decode(track, 40, 1);
  RunAll();
  Append(track, 5, 1);
  EXPECT_THAT(FormsOf(track), ElementsAre("16 kept: 256", "16 kept: 32", "plain: 13"));
  EXPECT_EQ(compactor_.Thin(*track.sequence, kAll).gained.segments, 1u * model_->lanes());
  EXPECT_THAT(FormsOf(track), ElementsAre("8 kept: 256", "16 kept: 32", "plain: 13"));
  EXPECT_EQ(Shown(track), "");
  Decode(track, 300, 3);  // sealed from raw rows, with a separate strategy
  RunAll();
  EXPECT_EQ(Shown(track), "");
}

// At any time in a sequence's life.
TEST_F(ThinTest, AnyTimeInALife) {
  for (int round = 0; round < 6; ++round) {
    Track track = NewTrack(Pressed());
    std::vector<Track> forks;
    for (int i = 0; i < 25; ++i) {
      switch (random_.Below(6)) {
        case 0:
          Append(track, random_.Between(1, 200), random_.Below(3), random_.OneIn(2));
          break;
        case 1:
          Decode(track, random_.Between(1, 100), random_.Below(3));
          break;
        case 2:
          if (!track.stamps.empty()) Truncate(track, random_.Between(1, track.stamps.size()));
          break;
        case 3:
          if (forks.size() < 3) forks.push_back(Fork(track));
          break;
        case 4:
          scheduler_.RunNext();
          break;
        default:
          RunAll();
      }
      compactor_.Thin(*track.sequence, random_.OneIn(2) ? 1 : kAll);
      ASSERT_EQ(Shown(track), "") << "round " << round << ", step " << i;
      for (const Track& fork : forks) ASSERT_EQ(Shown(fork), "");
      Collect();
    }
    ASSERT_TRUE(world_.tenant().FreeSequence(track.sequence->id()).ok());
    for (Track& fork : forks) {
      compactor_.Thin(*fork.sequence, kAll);
      ASSERT_EQ(Shown(fork), "");
      ASSERT_TRUE(world_.tenant().FreeSequence(fork.sequence->id()).ok());
    }
    RunAll();
  }
}

}  // namespace
}  // namespace tessera::compaction
