// Token policies that also pack: their remaining rows, and rows decided later, are packed as soon
// as a segment is full, and no raw copy waits for a choice that may never come.

#include <memory>
#include <numeric>
#include <string>
#include <utility>

#include "daemon/policies/grammar/parse.h"
#include "gtest/gtest.h"
#include "tests/unit/compaction/compactor_fixture.h"

namespace tessera::compaction {
namespace {

constexpr std::uint64_t kSegment = 64;
const std::string kPackedAtOnce =
    "+mosaickv:sinks=0,recent=0,keep=0.25,group=1,loss_k=1,loss_v=1,min_segment=32,segment=64,"
    "select=0";
// Decides once, at a prompt's end. `kMerges` leaves fewer entries than tokens, `kLeavesAll` as
// many.
const std::string kMerges = "semanticache:delimiters=0,tau=0.3,sink=2,recent=4,max_chunk=16";
const std::string kLeavesAll = "semanticache:delimiters=0,tau=1,sink=2,recent=4,max_chunk=16";

class PackedChoices : public CompactorTest, public testing::WithParamInterface<std::uint64_t> {
 protected:
  PackedChoices() : CompactorTest(/*raw_copy_bytes=*/GetParam(), 96 << 20) {
    model_ = world_.Register(cache::SmallModel("packed", 2, 2));
  }
  void CompressNow(Track& track) {
    const auto told = Compress(track);
    RunAll();
    ExpectTold(*told);
  }
  void DecodeSome(Track& track, int tokens) {
    for (int i = 0; i < tokens; i += 8) {
      Decode(track, 8, 1);
      RunAll();
    }
  }
  std::uint64_t Entries(const Track& track, bool packed) {
    std::uint64_t entries = 0;
    for (const cache::SegmentRun& run : track.sequence->Form()) {
      if (run.shape.packed() == packed) entries += run.entries;
    }
    return entries / model_->lanes();
  }
  // In all lanes at most one segment and one tile wait for a strategy, with their moments.
  void ExpectFewRowsWait(const Track& track) {
    constexpr std::uint64_t kMoments = 2 * 64 * 64 * sizeof(double);
    EXPECT_LE(RawBytes(), model_->lanes() * (256 * (kSegment + kernels::kTileEntries) + kMoments));
    EXPECT_LE(Entries(track, /*packed=*/false), kSegment + kernels::kTileEntries);
  }
};

TEST_P(PackedChoices, WhatIsDecodedBehindAChoiceGetsSegmentsOfItsOwn) {
  for (const std::string& policy : {kMerges, kLeavesAll}) {
    SCOPED_TRACE(policy);
    Track track = NewTrack(*policies::ParsePolicy(policy + kPackedAtOnce));
    Append(track, 200, 1, /*end_of_prompt=*/true);
    CompressNow(track);
    const std::uint64_t prompt = Entries(track, /*packed=*/true);
    const std::uint64_t sealed = counters().segments_sealed;
    DecodeSome(track, 640);
    EXPECT_GE(Entries(track, /*packed=*/true), prompt + 640 - kSegment);
    EXPECT_GT(counters().segments_sealed, sealed);
    ExpectFewRowsWait(track);
    // The next prompt is decided together with the earlier tokens that waited then.
    Append(track, 200, 1, /*end_of_prompt=*/true);
    const absl::StatusOr<std::uint64_t> from = compactor_.NormsFrom(*track.sequence, 0);
    ASSERT_TRUE(from.ok()) << from.status();
    EXPECT_EQ(*from, 840u) << "whatever has been settled of what was decoded";
    CompressNow(track);
    DecodeSome(track, 160);
    ExpectFewRowsWait(track);
    ASSERT_TRUE(world_.tenant().FreeSequence(track.sequence->id()).ok());
  }
}

TEST_P(PackedChoices, AChoiceThatLeavesAllIsPacked) {
  Track track = NewTrack(*policies::ParsePolicy(kLeavesAll + kPackedAtOnce));
  Append(track, 2000, 1, /*end_of_prompt=*/true);
  CompressNow(track);
  EXPECT_EQ(Entries(track, /*packed=*/true), 2000u);
  EXPECT_EQ(Entries(track, /*packed=*/false), 0u);
}

TEST_P(PackedChoices, AShortBeginningIsPackedWithWhatComesBehind) {
  for (const std::string& policy : {kMerges, kLeavesAll, std::string("streaming:sink=2,recent=300"),
                                    std::string("lacache:budget=300,span=1,sink=2")}) {
    SCOPED_TRACE(policy);
    const auto parsed = policies::ParsePolicy(policy + kPackedAtOnce);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    Track track = NewTrack(*parsed);
    Append(track, 3, 1, /*end_of_prompt=*/true);
    CompressNow(track);
    DecodeSome(track, 320);
    EXPECT_GE(Entries(track, /*packed=*/true), 200u);
    ExpectFewRowsWait(track);
    ASSERT_TRUE(world_.tenant().FreeSequence(track.sequence->id()).ok());
  }
}

// A worker need not say that a prompt has ended: decoded tokens do.
TEST_P(PackedChoices, DecodedTokensEndAPrompt) {
  Track track = NewTrack(*policies::ParsePolicy("streaming:sink=2,recent=100" + kPackedAtOnce));
  Append(track, 200, 1);
  DecodeSome(track, 160);
  const std::uint64_t entries = Entries(track, /*packed=*/true) + Entries(track, false);
  EXPECT_LE(entries, 102 + 2 * kernels::kTileEntries);
}

// A prompt that waits for its decision is not sealed. If there is no room for raw copies, it does
// not stop later rows from being packed.
TEST_P(PackedChoices, APromptThatWaitsForItsChoiceIsLeftToIt) {
  Track track = NewTrack(*policies::ParsePolicy(kMerges + kPackedAtOnce));
  Append(track, 200, 1, /*end_of_prompt=*/true);
  CompressNow(track);
  const std::uint64_t before = Entries(track, /*packed=*/true) + Entries(track, false);
  Append(track, 100, 1);
  DecodeSome(track, 640);
  EXPECT_EQ(Entries(track, true) + Entries(track, false), before + 740);
  if (GetParam() != 0) {
    EXPECT_LE(RawBytes(), GetParam());
    EXPECT_GE(Entries(track, /*packed=*/true), before + 740 - 100 - kSegment);
  }
  CompressNow(track);
  DecodeSome(track, 160);
  ExpectFewRowsWait(track);
}

// Bytes of raw copies: unlimited, and for 48 tokens of all lanes.
INSTANTIATE_TEST_SUITE_P(Budgets, PackedChoices, testing::Values(0, 48 * 4 * 256));

}  // namespace
}  // namespace tessera::compaction
