// Ends of prompts that are shorter than a segment.

#include "tests/unit/compaction/compactor_fixture.h"

namespace tessera::compaction {
namespace {

TEST_F(CompactorTest, ShortEndsTakeWhatIsSmallest) {
  policies::Policy policy = SmallMosaic();
  policy.mosaic->segments.min_tokens = 256;  // anything below is short
  // Nothing before it: a strategy of its own where that pays, else plain.
  Track track = NewTrack(policy);
  Append(track, 40, 1, true);
  RunAll();
  EXPECT_EQ(FormsOf(track), Forms{"plain: 40"});
  EXPECT_EQ(counters().left_plain, 2u);
  Append(track, 120, 1, true);
  RunAll();
  EXPECT_EQ(FormsOf(track), Forms{"16 kept: 160"});
  const std::uint64_t of_its_own = Used(pool::MemoryTag::kRotations);
  // The strategy before, where that loses little.
  Append(track, 50, 1, true);
  RunAll();
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 160", "16 kept: 50"}));
  EXPECT_EQ(Used(pool::MemoryTag::kRotations), of_its_own);
  // Also where one of its own would be smaller than plain rows.
  Append(track, 150, 1, true);
  RunAll();
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 160", "16 kept: 50", "16 kept: 150"}));
  EXPECT_EQ(Used(pool::MemoryTag::kRotations), of_its_own);
  Truncate(track, 210);
  // It does not, and one of its own does not pay.
  Append(track, 50, 2, true);
  RunAll();
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 160", "16 kept: 50", "plain: 50"}));
  // With more of them it does.
  Append(track, 150, 2, true);
  RunAll();
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 160", "16 kept: 50", "16 kept: 200"}));
  EXPECT_EQ(Used(pool::MemoryTag::kRotations), 2 * of_its_own);
  EXPECT_EQ(Shown(track), "");
}

// What was left plain, since the strategy before loses too much of it, is not encoded with that as
// soon as somebody decodes behind it. A fork knows.
TEST_F(CompactorTest, AShortEndThatStaysPlainWaitsForAStrategyOfItsOwn) {
  policies::Policy policy = SmallMosaic();
  policy.mosaic->segments.min_tokens = 256;
  Track track = NewTrack(policy);
  Append(track, 160, 1, true);
  RunAll();
  Append(track, 50, 2, true);
  RunAll();
  ASSERT_EQ(FormsOf(track), (Forms{"16 kept: 160", "plain: 50"}));
  Decode(track, 78, 2);
  RunAll();
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 160", "plain: 114"}));
  EXPECT_EQ(RawBytes(), 0u);
  EXPECT_EQ(Shown(track), "");
  Track fork = Fork(track);
  Decode(fork, 32, 1);
  RunAll();
  EXPECT_EQ(FormsOf(fork), (Forms{"16 kept: 160", "plain: 114", "plain: 46"}));
  EXPECT_EQ(Shown(fork), "");
  // With the least that a segment has.
  Decode(track, 160, 2);
  RunAll();
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 160", "16 kept: 256", "plain: 18"}));
  EXPECT_EQ(Shown(track), "");
  // Behind that it goes on as ever.
  Decode(track, 32, 2);
  RunAll();
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 160", "16 kept: 256", "16 kept: 32", "plain: 18"}));
}

}  // namespace
}  // namespace tessera::compaction
