// Seals of so many segments that they run in pieces, one job each: their memory, lack of memory,
// and what may happen between two pieces.

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/unit/compaction/compactor_fixture.h"

namespace tessera::compaction {
namespace {

constexpr std::uint64_t kSegment = 256;  // from SmallMosaic
constexpr std::uint64_t kOnePiece = 8;
constexpr std::uint64_t kManyPieces = 20;

class SealPieces : public CompactorTest {
 protected:
  static constexpr std::uint64_t kLimit = 64 << 20;
  SealPieces() : CompactorTest(0, kLimit) {}

  pool::Charge LeaveRoom(std::uint64_t bytes) {
    auto& account = const_cast<pool::Account&>(world_.tenant().account());
    return *account.Reserve(pool::MemoryTag::kPoolExtents, kLimit - account.used_bytes() - bytes);
  }
  std::uint64_t PoolUsed() {
    Collect();
    return Used(pool::MemoryTag::kTiles) + Used(pool::MemoryTag::kTables) +
           Used(pool::MemoryTag::kRotations);
  }
  // A prompt whose seals have been started by two jobs.
  Track Begun() {
    Track track = NewTrack(SmallMosaic());
    Append(track, kManyPieces * kSegment + 70, 1, /*end_of_prompt=*/true);
    EXPECT_TRUE(scheduler_.RunFirst(kSeal));
    EXPECT_TRUE(scheduler_.RunFirst(kSeal));
    return track;
  }
  void Free(Track& track) {
    ASSERT_TRUE(world_.tenant().FreeSequence(track.sequence->id()).ok());
    track = {};
  }
  // Runs all jobs, at most 200, which a correct seal never reaches.
  int CountJobs() {
    int jobs = 0;
    while (jobs < 200 && scheduler_.RunNext().has_value()) ++jobs;
    return jobs;
  }
};

// ---- Memory

TEST_F(SealPieces, OldAndNewFormOfOneLaneIsAllThatIsHeldTwice) {
  model_ = world_.Register(cache::SmallModel("wide", 4, 4));  // 16 lanes
  for (const std::uint64_t segments : {kOnePiece, kManyPieces}) {
    SCOPED_TRACE(segments);
    Track track = NewTrack(SmallMosaic());
    Append(track, segments * kSegment, 1, /*end_of_prompt=*/true);
    const std::uint64_t dense = PoolUsed();
    std::uint64_t peak = dense;
    while (scheduler_.RunNext().has_value()) peak = std::max(peak, PoolUsed());
    const std::uint64_t packed = PoolUsed();
    EXPECT_LT(packed, dense);
    EXPECT_LE(peak, dense + packed / model_->lanes() + 65536);
    Free(track);
  }
}

TEST_F(SealPieces, WhatFitsLaneByLaneIsSealed) {
  model_ = world_.Register(cache::SmallModel("wide", 4, 4));
  for (const std::uint64_t segments : {kOnePiece, kManyPieces}) {
    SCOPED_TRACE(segments);
    Track track = NewTrack(SmallMosaic());
    Append(track, segments * kSegment, 1, /*end_of_prompt=*/true);
    const pool::Charge rest = LeaveRoom(1200 << 10);  // for one and a half lanes
    const auto told = Compress(track);
    RunAll();
    EXPECT_TRUE(told->status.ok()) << told->status;
    Free(track);
  }
}

// With no room for any segment, or for a piece but not for all.
TEST_F(SealPieces, WithoutMemoryOneIsTriedNowAndThen) {
  for (const std::uint64_t room : {4 << 10, 500 << 10}) {
    SCOPED_TRACE(room);
    Track track = NewTrack(SmallMosaic());
    Append(track, kManyPieces * kSegment, 1, /*end_of_prompt=*/true);
    {
      const pool::Charge rest = LeaveRoom(room);
      EXPECT_LE(CountJobs(), 8);
      for (int look = 0; look < 3; ++look) {
        world_.clock().Advance(std::chrono::seconds(5));
        compactor_.Resume();
        EXPECT_LE(CountJobs(), 4);
      }
    }
    for (int look = 0; look < 20; ++look) {
      world_.clock().Advance(std::chrono::seconds(5));
      compactor_.Resume();
      RunAll();
    }
    EXPECT_EQ(FormsOf(track).size(), kManyPieces) << "there is room again";
    Free(track);
  }
}

TEST_F(SealPieces, ThePauseGrowsThoughAPieceFindsRoom) {
  model_ = world_.Register(cache::SmallModel("one lane", 1, 1));
  for (const std::uint64_t room : {4 << 10, 500 << 10}) {
    SCOPED_TRACE(room);
    Track track = NewTrack(SmallMosaic());
    Append(track, kManyPieces * kSegment, 1, /*end_of_prompt=*/true);
    {
      const pool::Charge rest = LeaveRoom(room);
      EXPECT_LE(CountJobs(), 8);
      int looks = 0;
      for (int ms = 0; ms < 20000; ms += 100) {
        world_.clock().Advance(std::chrono::milliseconds(100));
        compactor_.Resume();
        if (CountJobs() > 0) ++looks;
      }
      EXPECT_LT(looks, 15) << "in 20 s";
    }
    RunAll();
    Free(track);
  }
}

// ---- Between two pieces

TEST_F(SealPieces, WhatIsFreedGivesAllBack) {
  Track track = Begun();
  Free(track);
  EXPECT_EQ(PoolUsed(), 0u);
  RunAll();
}

TEST_F(SealPieces, AnotherPolicyGivesBackWhatWasBegun) {
  policies::Policy half = SmallMosaic();
  half.text = "another";
  half.mosaic->strategy.kept = {0.5};
  for (const policies::Policy& policy : {policies::Policy(), Quest(), half}) {
    SCOPED_TRACE(policy.text);
    Track track = NewTrack(SmallMosaic());
    Append(track, kManyPieces * kSegment + 70, 1, /*end_of_prompt=*/true);
    const std::uint64_t dense = PoolUsed();
    ASSERT_TRUE(scheduler_.RunFirst(kSeal));
    ASSERT_TRUE(scheduler_.RunFirst(kSeal));
    EXPECT_GT(PoolUsed(), dense);
    ASSERT_TRUE(compactor_.SetPolicy(*track.sequence, policy).ok());
    EXPECT_EQ(PoolUsed(), dense);
    RunAll();
    EXPECT_EQ(Shown(track), "");
    if (policy.mosaic.has_value()) {
      EXPECT_EQ(FormsOf(track).size(), kManyPieces + 1);
    }
    Free(track);
    EXPECT_EQ(PoolUsed(), 0u);
  }
}

// Also if the policy's work on it is finished.
TEST_F(SealPieces, ACutToTheSegmentBeforeGivesBackWhatWasBegun) {
  Track track = NewTrack(SmallMosaic());
  Append(track, kSegment, 1, /*end_of_prompt=*/true);
  RunAll();
  const std::uint64_t first = PoolUsed();
  Append(track, kManyPieces * kSegment + 70, 1, /*end_of_prompt=*/true);
  ASSERT_TRUE(scheduler_.RunFirst(kSeal));
  ASSERT_TRUE(scheduler_.RunFirst(kSeal));
  Truncate(track, kSegment);
  RunAll();
  EXPECT_EQ(FormsOf(track), Forms{"16 kept: 256"});
  EXPECT_EQ(PoolUsed(), first);
  EXPECT_FALSE(ManagedSequence::Of(*track.sequence)->Busy());
}

TEST_F(SealPieces, ForksTakeOverWhatIsMade) {
  Track track = Begun();
  std::vector<Track> forks;
  for (int i = 0; i < 3; ++i) {
    forks.push_back(Fork(track));
    scheduler_.RunFirst(kSeal);
  }
  RunAll();
  EXPECT_EQ(FormsOf(track).size(), kManyPieces + 1);
  EXPECT_EQ(counters().segments_sealed, (kManyPieces + 1) * model_->lanes());
  for (Track& fork : forks) {
    EXPECT_EQ(FormsOf(fork).size(), kManyPieces + 1);
    EXPECT_EQ(Shown(fork), "");
  }
}

// The second turn of a conversation: its answer begins before its question is sealed.
TEST_F(SealPieces, ATileLeavesThePromptToItsSeal) {
  for (const bool begun : {false, true}) {
    SCOPED_TRACE(begun);
    Track track = NewTrack(SmallMosaic());
    Append(track, kSegment, 1, /*end_of_prompt=*/true);
    RunAll();
    const std::uint64_t sealed = counters().segments_sealed;
    const std::uint64_t tiles = counters().tiles_encoded;
    Append(track, kManyPieces * kSegment, 1, /*end_of_prompt=*/true);
    if (begun) {
      ASSERT_TRUE(scheduler_.RunFirst(kSeal));
      ASSERT_TRUE(scheduler_.RunFirst(kSeal));
    }
    Decode(track, kernels::kTileEntries, 1);
    RunAll();
    EXPECT_EQ(counters().segments_sealed - sealed, kManyPieces * model_->lanes());
    EXPECT_EQ(counters().tiles_encoded - tiles, model_->lanes()) << "the answer's";
    EXPECT_EQ(Shown(track), "");
    Free(track);
  }
}

// ---- Callers

TEST_F(SealPieces, WhatSomebodyAskedForIsCutWithTheLane) {
  Track track = NewTrack(SmallMosaic());
  Append(track, 200, 1);
  const auto told = Compress(track);
  Truncate(track, 100);
  Append(track, 100, 2);  // of a prompt that has not ended
  RunAll();
  ExpectTold(*told);
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 100", "plain: 100"}));
}

TEST_F(SealPieces, WhatSomebodyAskedForIsCutBetweenPieces) {
  Track track = NewTrack(SmallMosaic());
  Append(track, (kManyPieces + 10) * kSegment + 100, 1);
  const auto told = Compress(track);
  ASSERT_TRUE(scheduler_.RunFirst(kSeal));
  Truncate(track, kManyPieces * kSegment);
  Append(track, 100, 2);  // of a prompt that has not ended
  RunAll();
  ExpectTold(*told);
  EXPECT_EQ(FormsOf(track).back(), "plain: 100");
}

// Whether the seals wait, are between two pieces, or some lanes are sealed.
TEST_F(SealPieces, CompressReportsAPolicyChange) {
  policies::Policy half = SmallMosaic();
  half.text = "half";
  half.mosaic->strategy.kept = {0.5};
  for (const policies::Policy& policy : {policies::Policy(), Quest(), half}) {
    for (const int jobs : {0, 1, 5}) {
      SCOPED_TRACE(policy.text + " after " + std::to_string(jobs));
      Track track = NewTrack(SmallMosaic());
      Append(track, kManyPieces * kSegment, 1);
      const auto told = Compress(track);
      for (int job = 0; job < jobs; ++job) ASSERT_TRUE(scheduler_.RunFirst(kSeal));
      ASSERT_TRUE(compactor_.SetPolicy(*track.sequence, policy).ok());
      RunAll();
      ExpectTold(*told, absl::StatusCode::kAborted);
      const auto again = Compress(track);
      RunAll();
      ExpectTold(*again);
      EXPECT_EQ(Shown(track), "");
      Free(track);
    }
  }
}

TEST_F(SealPieces, WhoAsksUnderOnePolicyThatIsSetAgainIsAnswered) {
  Track track = NewTrack(SmallMosaic());
  Append(track, kManyPieces * kSegment, 1);
  const auto told = Compress(track);
  ASSERT_TRUE(scheduler_.RunFirst(kSeal));
  ASSERT_TRUE(compactor_.SetPolicy(*track.sequence, SmallMosaic()).ok());
  RunAll();
  ExpectTold(*told);
  EXPECT_EQ(FormsOf(track).size(), kManyPieces);
}

TEST_F(SealPieces, CompressOfSummariesReportsAPolicyChange) {
  for (const policies::Policy& policy : {policies::Policy(), SmallMosaic()}) {
    SCOPED_TRACE(policy.text);
    Track track = NewTrack(Quest());
    Append(track, kSegment, 1);
    const auto told = Compress(track);
    ASSERT_TRUE(compactor_.SetPolicy(*track.sequence, policy).ok());
    RunAll();
    ExpectTold(*told, absl::StatusCode::kAborted);
    const auto again = Compress(track);
    RunAll();
    ExpectTold(*again);
    Free(track);
  }
}

// Also if the policy in between did nothing, and no result of it remains.
TEST_F(SealPieces, CompressUnderANewPolicyGetsItsResult) {
  Track track = NewTrack(SmallMosaic());
  Append(track, 300, 1);
  const auto before = Compress(track);
  ASSERT_TRUE(compactor_.SetPolicy(*track.sequence, policies::Policy()).ok());
  ASSERT_TRUE(compactor_.SetPolicy(*track.sequence, SmallMosaic()).ok());
  const auto after = Compress(track);
  RunAll();
  EXPECT_TRUE(absl::IsAborted(before->status)) << before->status;
  EXPECT_TRUE(after->status.ok()) << after->status;
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 256", "16 kept: 44"}));
}

// Its rows have the form of the policy in between.
TEST_F(SealPieces, CompressReportsAPolicyChangedAndRestored) {
  Track track = NewTrack(SmallMosaic());
  Append(track, 300, 1);
  const auto told = Compress(track);
  ASSERT_TRUE(compactor_.SetPolicy(*track.sequence, Quest()).ok());
  const auto summed_up = Compress(track);
  while (scheduler_.RunFirst(kTiles)) {
  }
  ASSERT_TRUE(compactor_.SetPolicy(*track.sequence, SmallMosaic()).ok());
  RunAll();
  ExpectTold(*summed_up);
  ExpectTold(*told, absl::StatusCode::kAborted);
}

TEST_F(SealPieces, WhatIsInTheTailIsPartOfWhatSomebodyAsksFor) {
  Track track = NewTrack(SmallMosaic());
  Append(track, 300, 1);
  track.tail = *worker_->Open(*track.sequence);
  for (const std::uint64_t stamp : DrawTokens(20, 1)) WriteTail(track, stamp);
  const auto told = Compress(track);
  RunAll();
  ExpectTold(*told);
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 256", "16 kept: 64"}));
  EXPECT_TRUE(track.sequence->decoding());
}

// ---- Changes after the sealed rows

// A speculating worker appends rows and cuts some of them off all the time.
TEST_F(SealPieces, RowsThatAreCutBehindWhatIsMadeCostNothing) {
  for (const bool cuts : {false, true}) {
    SCOPED_TRACE(cuts);
    const std::uint64_t before = counters().segments_sealed;
    Track track = NewTrack(SmallMosaic());
    Append(track, kManyPieces * kSegment, 1, /*end_of_prompt=*/true);
    int jobs = 0;
    for (; scheduler_.RunFirst(kSeal) && jobs < 200; ++jobs) {
      if (!cuts) continue;
      Append(track, 2, 1);
      Truncate(track, track.stamps.size() - 1);
    }
    EXPECT_LE(jobs, 40);
    RunAll();
    EXPECT_EQ(counters().segments_sealed - before, kManyPieces * model_->lanes());
    EXPECT_EQ(Shown(track), "");
    Free(track);
  }
}

// Between the check of what waits in the parent, and the fork, which has the rows.
TEST_F(SealPieces, APromptThatEndsAsItIsForkedIsSealedInBoth) {
  Track parent = NewTrack(SmallMosaic());
  Append(parent, 100, 1);
  const auto child = compactor_.Fork(*parent.sequence, [&] {
    Append(parent, 200, 1, /*end_of_prompt=*/true);
    return world_.tenant().Fork(worker_->session(), parent.sequence->id());
  });
  ASSERT_TRUE(child.ok()) << child.status();
  RunAll();
  const Track fork = {*child, parent.stamps, std::nullopt};
  for (const Track* each : {&std::as_const(parent), &fork}) {
    EXPECT_EQ(FormsOf(*each), (Forms{"16 kept: 256", "16 kept: 44"}));
  }
}

// More memory would not help, and no other seal waits for it.
TEST_F(SealPieces, MoreSegmentsThanALaneMayHaveAreRefusedAtOnce) {
  model_ = world_.Register(cache::SmallModel("one lane", 1, 1));
  policies::Policy shortest = SmallMosaic();
  shortest.text = "shortest";
  shortest.mosaic->segments.tokens = shortest.mosaic->segments.min_tokens = 32;
  Track track = NewTrack(shortest);
  constexpr std::uint64_t kTokens = 4096 * 32;
  Append(track, kTokens, 1, /*end_of_prompt=*/true);
  const auto told = Compress(track);
  EXPECT_LE(CountJobs(), 8);
  ExpectTold(*told, absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(counters().segments_sealed, 0u);
  Track other = NewTrack(SmallMosaic());
  Append(other, kSegment, 1, /*end_of_prompt=*/true);
  RunAll();
  EXPECT_EQ(FormsOf(other), Forms{"16 kept: 256"});
}

// ---- A spent budget

class SpentBudget : public CompactorTest {
 protected:
  SpentBudget() : CompactorTest(/*raw_copy_bytes=*/1 << 20) {}
};

TEST_F(SpentBudget, APromptBehindItGetsItsOwnStrategies) {
  for (const bool decodes : {false, true}) {
    SCOPED_TRACE(decodes);
    Track track = NewTrack(SmallMosaic());
    Append(track, 100, 1, /*end_of_prompt=*/true);
    RunAll();
    const pool::Charge rest = SqueezeRaw(0);
    Decode(track, kernels::kTileEntries, 1);  // keeps no raw copies of these and later rows
    RunAll();
    Append(track, 4 * kSegment, 3, /*end_of_prompt=*/true);
    if (decodes) Decode(track, kernels::kTileEntries, 3);  // before its seals run
    RunAll();
    const Forms forms = FormsOf(track);
    EXPECT_EQ(std::count(forms.begin(), forms.end(), "16 kept: 256"), 4);
    ASSERT_TRUE(world_.tenant().FreeSequence(track.sequence->id()).ok());
  }
}

}  // namespace
}  // namespace tessera::compaction
