// Sequences in every state that compaction can leave them in: forked, cut and freed there.

#include <functional>
#include <memory>

#include "gtest/gtest.h"
#include "tests/unit/compaction/compactor_fixture.h"

namespace tessera::compaction {
namespace {

// Each possible state of a lane; each is forked, cut and freed.
class InEveryState : public CompactorTest, public testing::WithParamInterface<int> {
 protected:
  Track Reach() {
    Track track = NewTrack(GetParam() >= 7 ? Quest() : SmallMosaic());
    const auto reach = [&](int state, const std::function<void()>& step) {
      if (GetParam() >= state) step();
    };
    if (GetParam() >= 7) {
      Append(track, 90, 1, true);
      if (GetParam() == 8) RunAll();
      return track;
    }
    reach(0, [&] { Append(track, 100, 1); });
    reach(1, [&] {
      compactor_.Appended(track.sequence, {.layers = 1, .end_of_prompt = true, .until = 100});
    });
    reach(2, [&] { RunAll(); });
    reach(3, [&] { Decode(track, 50, 1); });
    reach(4, [&] { RunAll(); });
    reach(5, [&] {
      Decode(track, 60, 2);
      while (scheduler_.RunFirst(kTiles)) {
      }
    });
    reach(6, [&] { RunAll(); });
    return track;
  }
};

TEST_P(InEveryState, AForkAndItsParentGoOnByThemselves) {
  Track parent = Reach();
  Track child = Fork(parent);
  EXPECT_EQ(Shown(child), "");
  RunAll();
  EXPECT_EQ(Shown(parent), "");
  EXPECT_EQ(Shown(child), "");
  Decode(parent, 70, 1);
  Decode(child, 70, 3);
  RunAll();
  EXPECT_EQ(Shown(parent), "");
  EXPECT_EQ(Shown(child), "");
  const auto told = Compress(child);
  RunAll();
  ExpectTold(*told);
  EXPECT_EQ(Shown(parent), "");
  EXPECT_EQ(Shown(child), "");
  ASSERT_TRUE(world_.tenant().FreeSequence(parent.sequence->id()).ok());
  Collect();
  EXPECT_EQ(Shown(child), "");
  Decode(child, 70, 3);
  RunAll();
  EXPECT_EQ(Shown(child), "");
}

TEST_P(InEveryState, ACutOfAnyLengthLeavesWhatIsShown) {
  const std::uint64_t full = Reach().stamps.size();
  RunAll();
  for (int round = 0; round < 6; ++round) {
    Track track = Reach();
    Truncate(track,
             random_.OneIn(2) ? 32 * random_.Between(0, full / 32) : random_.Between(0, full));
    EXPECT_EQ(Shown(track), "");
    RunAll();
    EXPECT_EQ(Shown(track), "");
    Append(track, random_.Between(1, 70), 2);
    Decode(track, random_.Between(1, 70), 2);
    RunAll();
    EXPECT_EQ(Shown(track), "") << track.stamps.size();
    const auto told = Compress(track);
    RunAll();
    ExpectTold(*told);
    EXPECT_EQ(Shown(track), "");
    ASSERT_TRUE(world_.tenant().FreeSequence(track.sequence->id()).ok());
  }
}

TEST_P(InEveryState, WhatIsFreedWhileJobsWaitIsDropped) {
  Track track = Reach();
  const auto told = Compress(track);
  EXPECT_EQ(told->times, 0);
  ASSERT_TRUE(world_.tenant().FreeSequence(track.sequence->id()).ok());
  track = {};
  Collect();
  EXPECT_EQ(world_.tenant().pool().used_bytes(), 0u);
  EXPECT_EQ(RawBytes(), 0u);
  RunAll();
  EXPECT_EQ(told->times, 1);
  EXPECT_TRUE(absl::IsCancelled(told->status)) << told->status;
  EXPECT_EQ(LogLines(), 0);
}

TEST_P(InEveryState, APolicyThatDoesNotPackGivesUpTheRawRows) {
  Track track = Reach();
  ASSERT_TRUE(compactor_.SetPolicy(*track.sequence, policies::Policy()).ok());
  EXPECT_EQ(RawBytes(), 0u);
  EXPECT_EQ(Shown(track), "");
  RunAll();
  EXPECT_EQ(RawBytes(), 0u);
  EXPECT_EQ(Shown(track), "");
  ASSERT_TRUE(world_.tenant().FreeSequence(track.sequence->id()).ok());
}

INSTANTIATE_TEST_SUITE_P(States, InEveryState, testing::Range(0, 9));

}  // namespace
}  // namespace tessera::compaction
