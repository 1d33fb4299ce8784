// Ends of prompts that are shorter than a segment.

#include <string>
#include <utility>

#include "tests/unit/compaction/compactor_fixture.h"

namespace tessera::compaction {
namespace {

TEST_F(CompactorTest, ShortEndsTakeWhatIsSmallest) {
  policies::Policy policy = SmallMosaic();
  policy.mosaic->segments.min_tokens = 256;  // shorter ends are short
  // Without a previous segment: its own strategy if that pays off, else dense.
  Track track = NewTrack(policy);
  Append(track, 40, 1, true);
  RunAll();
  EXPECT_EQ(FormsOf(track), Forms{"plain: 40"});
  EXPECT_EQ(counters().left_plain, 2u);
  Append(track, 120, 1, true);
  RunAll();
  EXPECT_EQ(FormsOf(track), Forms{"16 kept: 160"});
  const std::uint64_t of_its_own = Used(pool::MemoryTag::kRotations);
  // Uses the previous strategy if its loss is small.
  Append(track, 50, 1, true);
  RunAll();
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 160", "16 kept: 50"}));
  EXPECT_EQ(Used(pool::MemoryTag::kRotations), of_its_own);
  // Even if a separate strategy would be smaller than dense rows.
  Append(track, 150, 1, true);
  RunAll();
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 160", "16 kept: 50", "16 kept: 150"}));
  EXPECT_EQ(Used(pool::MemoryTag::kRotations), of_its_own);
  Truncate(track, 210);
  // Its loss is large, and a separate strategy does not pay off.
  Append(track, 50, 2, true);
  RunAll();
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 160", "16 kept: 50", "plain: 50"}));
  // With more rows it does.
  Append(track, 150, 2, true);
  RunAll();
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 160", "16 kept: 50", "16 kept: 200"}));
  EXPECT_EQ(Used(pool::MemoryTag::kRotations), 2 * of_its_own);
  EXPECT_EQ(Shown(track), "");
}

// An end left dense, because the previous strategy loses too much of it, is not encoded with that
// strategy once decoding continues. A fork knows this too.
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
  // Reaches the minimum segment length.
  Decode(track, 160, 2);
  RunAll();
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 160", "16 kept: 256", "plain: 18"}));
  EXPECT_EQ(Shown(track), "");
  // Later rows are encoded as usual.
  Decode(track, 32, 2);
  RunAll();
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 160", "16 kept: 256", "16 kept: 32", "plain: 18"}));
}

// After a truncation back to the prompt its dense end is still left dense; rows written in place of
// the end are not.
TEST_F(CompactorTest, WhatWasLeftPlainIsSoAsLongAsItIsThere) {
  policies::Policy policy = SmallMosaic();
  policy.mosaic->segments.min_tokens = 256;
  Track track = NewTrack(policy);
  Append(track, 160, 1, true);
  RunAll();
  Append(track, 50, 2, true);
  RunAll();
  ASSERT_EQ(FormsOf(track), (Forms{"16 kept: 160", "plain: 50"}));
  Track regenerated = Fork(track);
  for (Track* each : {&track, &regenerated}) {
    Decode(*each, 64, 2);
    RunAll();
    Truncate(*each, 210);
    Decode(*each, 64, 2);
    RunAll();
    EXPECT_EQ(FormsOf(*each).size(), FormsOf(track).size());
    for (const std::string& form : FormsOf(*each)) {
      EXPECT_TRUE(form == "16 kept: 160" || form.starts_with("plain")) << form;
    }
    EXPECT_EQ(Shown(*each), "");
  }
  Truncate(track, 160);
  Decode(track, 64, 1);
  RunAll();
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 160", "16 kept: 64"}));
  EXPECT_EQ(Shown(track), "");
}

// A waiting prompt end keeps its place, whatever is appended meanwhile.
TEST_F(CompactorTest, ThePromptsEndIsWhereItWas) {
  Track track = NewTrack(SmallMosaic());
  Append(track, 100, 1, true);
  Append(track, 90, 2);  // the first part of the next prompt
  RunAll();
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 100", "plain: 90"}));
  // Two waiting ends become one; whole segments are sealed, and a remainder stays.
  Append(track, 60, 1, true);
  Append(track, 20, 1, true);
  Append(track, 300, 1);
  RunAll();
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 100", "16 kept: 170", "16 kept: 256", "plain: 44"}));
  // Truncating inside an end moves it to the cut.
  Append(track, 60, 1, true);
  Truncate(track, 540);
  Append(track, 60, 2);
  RunAll();
  EXPECT_EQ(FormsOf(track),
            (Forms{"16 kept: 100", "16 kept: 170", "16 kept: 256", "16 kept: 14", "plain: 60"}));
  EXPECT_EQ(Shown(track), "");
}

// Decoded rows after a waiting end are cut separately, and so are dense leftovers together with
// them.
TEST_F(CompactorTest, AnEndThatWaitsTakesNoCutFromWhatIsDecodedBehindIt) {
  // The tail delivers rows up to the end of a tile: 124 and 120 of 140.
  const std::pair<std::uint64_t, Forms> cases[] = {
      {100, {"16 kept: 100", "16 kept: 96", "plain: 28"}}, {40, {"16 kept: 160"}}};
  for (const auto& [prompt, forms] : cases) {
    SCOPED_TRACE(prompt);
    policies::Policy policy = SmallMosaic();
    policy.mosaic->segments.min_tokens = 96;
    Track track = NewTrack(policy);
    Append(track, prompt, 1, true);
    Decode(track, 140, 2);
    while (scheduler_.RunFirst(kTiles)) {
    }
    RunAll();
    EXPECT_EQ(FormsOf(track), forms);
    EXPECT_EQ(Shown(track), "");
  }
}

}  // namespace
}  // namespace tessera::compaction
