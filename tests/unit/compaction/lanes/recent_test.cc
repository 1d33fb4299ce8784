// Policies that leave the newest tokens unchanged.

#include <algorithm>
#include <cstdint>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/compaction/compactor_fixture.h"

namespace tessera::compaction {
namespace {

using testing::ElementsAre;

class RecentTest : public CompactorTest {
 protected:
  static policies::Policy Keeping(std::uint64_t recent) {
    policies::Policy policy = SmallMosaic();
    policy.mosaic->segments.recent = recent;
    return policy;
  }
  // The number of dense entries at the end of every lane.
  std::uint64_t PlainAtTheEnd(const Track& track) {
    const cache::SequenceView view = View(track);
    std::uint64_t least = ~std::uint64_t{0};
    for (const cache::SequenceView::LaneOf& lane : view.lanes) {
      std::uint64_t plain = 0;
      for (std::uint32_t s = lane.resolved.segments; s-- > 0;) {
        const kernels::SegmentView& segment = view.segments[lane.first_segment + s];
        if (segment.shape.packed()) break;
        plain += segment.entries;
      }
      least = std::min(least, plain);
    }
    return least;
  }
};

TEST_F(RecentTest, ThePromptsEndWaits) {
  Track track = NewTrack(Keeping(32));
  Append(track, 300, 1, /*end_of_prompt=*/true);
  RunAll();
  EXPECT_THAT(FormsOf(track), ElementsAre("16 kept: 256", "plain: 44"));
  EXPECT_EQ(Shown(track), "");
  // A repeated call changes nothing.
  const auto told = Compress(track);
  RunAll();
  ExpectTold(*told);
  EXPECT_THAT(FormsOf(track), ElementsAre("16 kept: 256", "plain: 44"));
}

TEST_F(RecentTest, AShortPromptIsLeftAsItIs) {
  Track track = NewTrack(Keeping(32));
  Append(track, 63, 1, /*end_of_prompt=*/true);
  RunAll();
  EXPECT_THAT(FormsOf(track), ElementsAre("plain: 63"));
}

TEST_F(RecentTest, WhileDecodingTilesWaitForTheNext) {
  Track track = NewTrack(Keeping(40));
  Append(track, 300, 1, /*end_of_prompt=*/true);
  RunAll();
  EXPECT_THAT(FormsOf(track), ElementsAre("16 kept: 256", "plain: 44"));
  for (int i = 0; i < 12; ++i) {
    Decode(track, 32, 1);
    RunAll();
    EXPECT_GE(PlainAtTheEnd(track), 40u);
    EXPECT_LT(PlainAtTheEnd(track), 40u + 2 * kernels::kTileEntries);
    EXPECT_EQ(Shown(track), "");
  }
}

// After any operation the newest tokens are unchanged, and readers see the right rows.
TEST_F(RecentTest, AnyTimeInALife) {
  for (int round = 0; round < 6; ++round) {
    const std::uint64_t recent = random_.Between(1, 100);
    Track track = NewTrack(Keeping(recent));
    std::uint64_t since_cut = 0;  // tokens since the last cut, or since the start
    for (int i = 0; i < 20; ++i) {
      const std::uint64_t before = track.stamps.size();
      switch (random_.Below(4)) {
        case 0:
          Append(track, random_.Between(1, 300), random_.Below(3), random_.OneIn(2));
          break;
        case 1:
          Decode(track, random_.Between(1, 100), random_.Below(3));
          break;
        case 2:
          if (before > 0 && random_.OneIn(3)) {
            Truncate(track, random_.Between(1, before));
            since_cut = 0;
          }
          break;
        default:
          compactor_.Appended(track.sequence,
                              {.layers = 1, .end_of_prompt = true, .until = track.stamps.size()});
      }
      if (track.stamps.size() > before) since_cut += track.stamps.size() - before;
      RunAll();
      ASSERT_EQ(Shown(track), "") << "round " << round << ", step " << i;
      // Rows in a tail ring are dense and in no segment.
      const std::uint64_t in_tail = track.stamps.size() - View(track).lanes[0].resolved.tail_start;
      ASSERT_GE(PlainAtTheEnd(track) + in_tail, std::min(recent, since_cut))
          << "round " << round << ", step " << i;
    }
    ASSERT_TRUE(world_.tenant().FreeSequence(track.sequence->id()).ok());
    RunAll();
  }
}

}  // namespace
}  // namespace tessera::compaction
