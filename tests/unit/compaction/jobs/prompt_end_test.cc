// The end of a prompt that waits for its seal, while the lane changes.

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "daemon/compaction/jobs/managed_sequence.h"
#include "daemon/policies/grammar/parse.h"
#include "tests/unit/compaction/compactor_fixture.h"

namespace tessera::compaction {
namespace {

// Kernels that call back while a strategy is being made, in the middle of a seal.
struct CallbackKernels {
  static inline std::function<void()> told;
  static const char* Moments(const kernels::MomentsJob& job) {
    if (told) std::exchange(told, nullptr)();
    return kernels::OperationsOf(kernels::BestImplementation()).moments(job);
  }
  CallbackKernels() { operations.moments = Moments; }
  kernels::Operations operations = kernels::OperationsOf(kernels::BestImplementation());
};

class PromptEnd : public CompactorTest {
 protected:
  static constexpr std::uint64_t kLimit = 16 << 20;
  PromptEnd() : CompactorTest(0, kLimit) {}
  // A short end stays dense if the previous strategy loses too much of it.
  static policies::Policy WithLongSegments() {
    policies::Policy policy = SmallMosaic();
    policy.mosaic->segments.min_tokens = 256;
    return policy;
  }
  void ExpectPlainBehind(const Track& track, const std::string& first) {
    const Forms forms = FormsOf(track);
    ASSERT_FALSE(forms.empty());
    EXPECT_EQ(forms.front(), first);
    for (std::size_t i = 1; i < forms.size(); ++i) EXPECT_TRUE(forms[i].starts_with("plain"));
  }
};

// Positions of entries are token numbers, even if keys were re-rotated to other positions.
TEST_F(PromptEnd, IsSealedWherePositionsWereMoved) {
  cache::ModelSpec spec = cache::SmallModel("turned", 1, 2);
  spec.rope_theta = 10000;
  model_ = world_.Register(spec);
  Track track = NewTrack(SmallMosaic());
  ASSERT_TRUE(
      compactor_
          .SetPolicy(*track.sequence, *policies::ParsePolicy("streaming:sink=2,recent=40,pos=slot"))
          .ok());
  Append(track, 100, 1, true);
  const auto told = Compress(track);
  RunAll();
  ExpectTold(*told);
  ASSERT_EQ(track.sequence->position_shift(), 58u);
  ASSERT_TRUE(compactor_.SetPolicy(*track.sequence, SmallMosaic()).ok());
  Append(track, 100, 1, true);
  RunAll();
  EXPECT_EQ(track.sequence->OpenEntries(0), 0u);
}

TEST_F(PromptEnd, ThatWasLeftPlainIsKnownToWhoeverHoldsIt) {
  const policies::Policy policy = WithLongSegments();
  const Stamps first = DrawTokens(160, 1), second = DrawTokens(50, 2);
  Track one = NewTrack(policy), other = NewTrack(policy);
  for (Track* track : {&one, &other}) {
    AppendStamps(*track, first, true);
    RunAll();
    AppendStamps(*track, second, true);
    RunAll();
    ASSERT_EQ(FormsOf(*track), (Forms{"16 kept: 160", "plain: 50"}));
  }
  // As after publishing a duplicate: afterwards it holds the other sequence's rows.
  ASSERT_TRUE(compactor_.AdoptPrefix(*other.sequence, *one.sequence).ok());
  Track fork = Fork(one);
  // Setting the same policy again changes nothing.
  ASSERT_TRUE(compactor_.SetPolicy(*one.sequence, policy).ok());
  for (Track* track : {&one, &other, &fork}) {
    Decode(*track, 78, 2);
    RunAll();
    ExpectPlainBehind(*track, "16 kept: 160");
    EXPECT_EQ(Shown(*track), "");
  }
}

// The seal has begun, meets the cut and finds no memory. It is retried with the new end.
TEST_F(PromptEnd, ThatIsCutOffUnderItsSealIsWhereTheCutIs) {
  const CallbackKernels telling;
  Compactor compactor({.scheduler = &scheduler_,
                       .logger = &logger_,
                       .clock = &world_.clock(),
                       .operations = &telling.operations});
  Track track = NewTrack(SmallMosaic());
  const auto append = [&](std::uint64_t tokens, bool end_of_prompt) {
    const Stamps stamps = DrawTokens(tokens, 1);
    const std::uint64_t before = track.stamps.size();
    ASSERT_TRUE(compactor
                    .Append(track.sequence,
                            {.layers = 1,
                             .end_of_prompt = end_of_prompt,
                             .first_token = before,
                             .until = before + tokens},
                            DrawnRows(model_->layout(), stamps))
                    .ok());
    track.stamps.insert(track.stamps.end(), stamps.begin(), stamps.end());
  };
  append(200, true);
  {
    auto& account = const_cast<pool::Account&>(world_.tenant().account());
    const pool::Charge rest =
        *account.Reserve(pool::MemoryTag::kPoolExtents, kLimit - account.used_bytes() - 4096);
    bool cut = false;
    CallbackKernels::told = [&] {
      cut = compactor.Truncate(*track.sequence, 100).ok();
      track.stamps.resize(100);
    };
    RunAll();
    ASSERT_TRUE(cut);
  }
  append(60, false);  // the first part of another prompt
  world_.clock().Advance(std::chrono::seconds(5));
  compactor.Resume();
  RunAll();
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 100", "plain: 60"}));
  EXPECT_EQ(Shown(track), "");
}

// A seal whose job waits for its lane also uses the new end.
TEST_F(PromptEnd, ThatIsCutOffWhileItsJobWaitsIsWhereTheCutIs) {
  model_ = world_.Register(cache::SmallModel("one", 1, 1));
  Track track = NewTrack(SmallMosaic());
  Append(track, 200, 1, true);
  const std::shared_ptr<ManagedSequence> managed = ManagedSequence::Of(*track.sequence);
  LaneWork& work = *managed->lane(0).work;
  std::thread job;
  {
    MutexLock lock(work.mutex);
    job = std::thread([&] { scheduler_.RunFirst(kSeal); });
    while (work.seals.wanted()) std::this_thread::yield();
    Truncate(track, 100);
    Append(track, 60, 2);
  }
  job.join();
  RunAll();
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 100", "plain: 60"}));
  EXPECT_EQ(Shown(track), "");
}

TEST_F(PromptEnd, OfThePromptThatFollowsIsNotWhereDecodingWasCut) {
  Track track = NewTrack(SmallMosaic());
  Decode(track, 64, 1);
  while (scheduler_.RunFirst(kTiles)) {
  }
  ASSERT_EQ(scheduler_.Queued(), (Forms{kSeal, kSeal}));
  Append(track, 100, 2);  // the first part of a prompt
  RunAll();
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 64", "plain: 100"}));
}

// Another job always holds the lane: the seal is retried with the lane's next rows, whatever they
// are.
TEST_F(PromptEnd, ThatMetSomebodyComesWithTheNextPrompt) {
  Track track = NewTrack(SmallMosaic());
  Append(track, 200, 1, true);
  const absl::Status held =
      track.sequence->Recode({.lane = 0}, [&](const cache::OpenRun&) -> LaneCoder::Swap {
        while (scheduler_.RunFirst(kSeal)) {
        }
        return std::nullopt;
      });
  ASSERT_TRUE(held.ok()) << held;
  ASSERT_EQ(FormsOf(track), Forms{"plain: 200"});
  Append(track, 40, 2);
  RunAll();
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 200", "plain: 40"}));
}

TEST_F(PromptEnd, ThatFoundNoMemoryIsKeptUnderAPolicyThatSealsNothing) {
  Track track = NewTrack(SmallMosaic());
  Append(track, 200, 1, true);
  {
    auto& account = const_cast<pool::Account&>(world_.tenant().account());
    const pool::Charge rest =
        *account.Reserve(pool::MemoryTag::kPoolExtents, kLimit - account.used_bytes() - 4096);
    RunAll();
  }
  ASSERT_TRUE(compactor_.SetPolicy(*track.sequence, Quest()).ok());
  ASSERT_TRUE(compactor_.SetPolicy(*track.sequence, SmallMosaic()).ok());
  world_.clock().Advance(std::chrono::seconds(5));
  compactor_.Resume();
  RunAll();
  EXPECT_EQ(FormsOf(track), Forms{"16 kept: 200"});
  EXPECT_FALSE(ManagedSequence::Of(*track.sequence)->Busy());
}

// A seal of many segments takes many jobs: tails are absorbed between them, and readers see the
// result at once.
TEST_F(PromptEnd, ALongSealIsDoneInPieces) {
  Track track = NewTrack(SmallMosaic());
  Append(track, 20 * 256 + 70, 1, /*end_of_prompt=*/true);
  Track other = NewTrack(Quest());
  Append(other, 40, 1);
  int pieces = 0, tails = 0;
  while (scheduler_.RunFirst(kSeal)) {
    ++pieces;
    if (FormsOf(track).size() == 1) {
      Decode(other, 32, 1);
      tails += scheduler_.RunFirst(kTiles) ? 1 : 0;
      EXPECT_TRUE(ManagedSequence::Of(*track.sequence)->Busy()) << "it stays in the pool";
    }
    EXPECT_EQ(Shown(track), "");
  }
  RunAll();
  EXPECT_EQ(FormsOf(track).size(), 21u);
  EXPECT_GE(pieces, 6) << "of two lanes";
  EXPECT_GE(tails, 2);
  EXPECT_EQ(counters().segments_sealed, 21u * model_->lanes()) << "none twice";
  EXPECT_FALSE(ManagedSequence::Of(*track.sequence)->Busy());
}

// After a cut between two pieces, only the affected segments are made again.
TEST_F(PromptEnd, ALongSealThatIsCutGoesOnFromThere) {
  for (const bool forked : {false, true}) {
    SCOPED_TRACE(forked);
    Track track = NewTrack(SmallMosaic());
    Append(track, 20 * 256, 1, /*end_of_prompt=*/true);
    std::optional<Track> fork;
    ASSERT_TRUE(scheduler_.RunFirst(kSeal));
    if (forked) fork = Fork(track);
    Truncate(track, 6 * 256 + 100);
    const auto told = Compress(track);
    RunAll();
    ExpectTold(*told);
    EXPECT_EQ(FormsOf(track).size(), 7u);
    EXPECT_EQ(track.sequence->OpenEntries(0), 0u);
    EXPECT_EQ(Shown(track), "");
    if (forked) {
      EXPECT_EQ(FormsOf(*fork).size(), 20u);
      EXPECT_EQ(Shown(*fork), "");
    }
  }
}

// Warned when the policy is set, not when memory has run out.
TEST_F(PromptEnd, SegmentsThatAreLargerThanTheirRowsAreWarnedOf) {
  policies::Policy policy = SmallMosaic();
  policy.mosaic->segments = {
      .tokens = 256, .min_tokens = 256, .sinks = 0, .recent = 0, .loss_window = 64};
  NewTrack(policy);
  EXPECT_EQ(LinesWith(kShortSegments), 0) << "16 KiB of rotations beside 64 KiB of rows";
  policy.mosaic->segments.min_tokens = 32;
  NewTrack(policy);
  EXPECT_EQ(LinesWith(kShortSegments), 1) << "beside 8 KiB";
  NewTrack(policy);
  EXPECT_EQ(LinesWith(kShortSegments), 1) << "once a minute";
}

}  // namespace
}  // namespace tessera::compaction
