// Work that finds no memory waits and is retried, and so does work that meets a new policy.

#include "daemon/compaction/jobs/deferred_seals.h"

#include <chrono>

#include "daemon/policies/grammar/parse.h"
#include "tests/unit/compaction/compactor_fixture.h"

namespace tessera::compaction {
namespace {

using std::chrono::milliseconds;

constexpr TenantId kOne{1};
constexpr TenantId kOther{2};

DeferredSeals::Item ItemOf(TenantId tenant, std::uint32_t lane) {
  return {.tenant = tenant, .sequence = {}, .lane = lane};
}

TEST(DeferredSeals, OneOfALineIsTriedAtATimeAndTheOthersFollowAtOnce) {
  DeferredSeals seals;
  const Clock::TimePoint start{};
  EXPECT_FALSE(seals.Any(kOne));
  EXPECT_EQ(seals.DueIn(start), std::nullopt);
  EXPECT_TRUE(seals.Join(ItemOf(kOne, 1), start));
  EXPECT_FALSE(seals.Join(ItemOf(kOne, 2), start)) << "it waits behind the first";
  EXPECT_TRUE(seals.Any(kOne));
  EXPECT_FALSE(seals.Any(kOther));
  EXPECT_EQ(seals.DueIn(start), DeferredSeals::kFirstPause);
  EXPECT_TRUE(seals.TakeDue(start + DeferredSeals::kFirstPause - milliseconds(1)).empty());
  const std::vector<DeferredSeals::Item> due = seals.TakeDue(start + DeferredSeals::kFirstPause);
  ASSERT_EQ(due.size(), 1u);
  EXPECT_EQ(due[0].lane, 1u);
  EXPECT_TRUE(seals.TakeDue(start + std::chrono::hours(1)).empty()) << "it has not been answered";
  EXPECT_EQ(seals.DueIn(start), std::nullopt);
  const std::optional<DeferredSeals::Item> next = seals.Next(kOne, true);
  ASSERT_TRUE(next.has_value());
  EXPECT_EQ(next->lane, 2u);
  EXPECT_TRUE(seals.Any(kOne)) << "it is being tried";
  EXPECT_EQ(seals.Next(kOne, true), std::nullopt);
  EXPECT_FALSE(seals.Any(kOne));
}

TEST(DeferredSeals, PausesDoubleUntilOneFindsMemory) {
  DeferredSeals seals;
  Clock::TimePoint now{};
  Clock::Duration pause = DeferredSeals::kFirstPause;
  ASSERT_TRUE(seals.Join(ItemOf(kOne, 0), now));
  for (int round = 0; round < 12; ++round) {
    ASSERT_EQ(seals.DueIn(now), pause) << round;
    now += pause;
    ASSERT_EQ(seals.TakeDue(now).size(), 1u);
    seals.Return(ItemOf(kOne, 0), now);
    pause = std::min(2 * pause, DeferredSeals::kLongestPause);
  }
  EXPECT_EQ(pause, DeferredSeals::kLongestPause);
  ASSERT_EQ(seals.TakeDue(now + pause).size(), 1u);
  EXPECT_EQ(seals.Next(kOne, true), std::nullopt);
  ASSERT_TRUE(seals.Join(ItemOf(kOne, 0), now));
  EXPECT_EQ(seals.DueIn(now), DeferredSeals::kFirstPause);
}

TEST(DeferredSeals, WhatFailsGoesBehindTheOthersAndTenantsDoNotWaitForEachOther) {
  DeferredSeals seals;
  const Clock::TimePoint start{};
  seals.Join(ItemOf(kOne, 1), start);
  seals.Join(ItemOf(kOne, 2), start);
  EXPECT_TRUE(seals.Join(ItemOf(kOther, 3), start + milliseconds(5)));
  EXPECT_EQ(seals.TakeDue(start + DeferredSeals::kFirstPause).size(), 1u);
  EXPECT_EQ(seals.DueIn(start + DeferredSeals::kFirstPause), milliseconds(5));
  seals.Return(ItemOf(kOne, 1), start + DeferredSeals::kFirstPause);
  const Clock::TimePoint later = start + std::chrono::seconds(1);
  const std::vector<DeferredSeals::Item> due = seals.TakeDue(later);
  ASSERT_EQ(due.size(), 2u);
  EXPECT_EQ(due[0].lane, 2u);
  EXPECT_EQ(due[1].lane, 3u);
}

TEST(DeferredSeals, JoiningDuringARetryHasNoEffectOnOthers) {
  DeferredSeals seals;
  const Clock::TimePoint start{};
  ASSERT_TRUE(seals.Join(ItemOf(kOne, 1), start));
  const Clock::TimePoint due = start + DeferredSeals::kFirstPause;
  ASSERT_EQ(seals.TakeDue(due).size(), 1u);
  EXPECT_FALSE(seals.Join(ItemOf(kOne, 2), due));
  EXPECT_TRUE(seals.TakeDue(due + std::chrono::hours(1)).empty()) << "the first is being tried";
  seals.Return(ItemOf(kOne, 1), due);
  EXPECT_EQ(seals.DueIn(due), 2 * DeferredSeals::kFirstPause);
  ASSERT_EQ(seals.TakeDue(due + 2 * DeferredSeals::kFirstPause).front().lane, 2u);
  // A job that needed no memory does not start a wait.
  ASSERT_EQ(seals.Next(kOne, false)->lane, 1u);
  seals.Return(ItemOf(kOne, 1), due);
  EXPECT_EQ(seals.DueIn(due), 4 * DeferredSeals::kFirstPause);
}

// ---- Through the compactor

class WithoutMemory : public CompactorTest {
 protected:
  static constexpr std::uint64_t kLimit = 4 << 20;
  WithoutMemory() : CompactorTest(0, kLimit) {}
  pool::Charge Squeeze(std::uint64_t room) {
    auto& account = const_cast<pool::Account&>(world_.tenant().account());
    return *account.Reserve(pool::MemoryTag::kPoolExtents, kLimit - account.used_bytes() - room);
  }
  // Like the daemon's watcher, until nothing is due.
  void ResumeAfter(Clock::Duration time) {
    world_.clock().Advance(time);
    compactor_.Resume();
    RunAll();
  }
};

TEST_F(WithoutMemory, APromptsEndIsSealedWhenThereIsSome) {
  Track track = NewTrack(SmallMosaic());
  Track other = NewTrack(SmallMosaic());
  Track gone = NewTrack(SmallMosaic());
  for (Track* each : {&track, &gone, &other}) Append(*each, 200, 1, true);
  {
    const pool::Charge rest = Squeeze(4096);
    RunAll();
    EXPECT_EQ(attentions_, 1);
    for (int round = 0; round < 3; ++round) ResumeAfter(std::chrono::seconds(5));
    EXPECT_EQ(counters().segments_sealed, 0u);
    EXPECT_EQ(FormsOf(track), Forms{"plain: 200"});
    EXPECT_TRUE(scheduler_.Queued().empty());
    EXPECT_FALSE(ManagedSequence::Of(*track.sequence)->Busy()) << "it may be moved out";
    // Nor does each new seal try on its own.
    const std::uint64_t tried = counters().strategies_made;
    Track late = NewTrack(SmallMosaic());
    compactor_.Appended(track.sequence,
                        {.layers = 1, .end_of_prompt = true, .until = track.stamps.size()});
    RunAll();
    EXPECT_EQ(counters().strategies_made, tried);
    ASSERT_TRUE(world_.tenant().FreeSequence(late.sequence->id()).ok());
  }
  ASSERT_TRUE(world_.tenant().FreeSequence(gone.sequence->id()).ok());
  gone = {};
  ResumeAfter(std::chrono::seconds(5));
  EXPECT_EQ(FormsOf(track), Forms{"16 kept: 200"});
  EXPECT_EQ(FormsOf(other), Forms{"16 kept: 200"});
  EXPECT_EQ(Shown(track), "");
  EXPECT_EQ(compactor_.Resume(), std::nullopt);
  EXPECT_EQ(counters().segments_sealed, 4u) << "each lane once";
}

// Tokens after a waiting prompt end belong to the next prompt, which has not ended yet.
TEST_F(WithoutMemory, AnEndThatWaitsTakesNothingOfTheNextPrompt) {
  for (const bool asked : {true, false}) {
    SCOPED_TRACE(asked);
    Track track = NewTrack(SmallMosaic());
    Append(track, 200, 1, true);
    {
      const pool::Charge rest = Squeeze(4096);
      RunAll();
    }
    if (asked) {
      const auto told = Compress(track);
      RunAll();
      ExpectTold(*told);
    }
    Append(track, 40, 1);
    ResumeAfter(std::chrono::seconds(5));
    EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 200", "plain: 40"}));
    EXPECT_EQ(compactor_.Resume(), std::nullopt);
    ASSERT_TRUE(world_.tenant().FreeSequence(track.sequence->id()).ok());
  }
}

// Another job always holds the lane: the seal is retried with the lane's next rows.
TEST_F(CompactorTest, ASealThatMeetsSomebodyComesWithTheNextTile) {
  Track track = NewTrack(SmallMosaic());
  Append(track, 200, 1, true);
  ASSERT_TRUE(track.sequence
                  ->Recode({.lane = 0},
                           [&](const cache::OpenRun&) -> LaneCoder::Swap {
                             while (scheduler_.RunFirst(kSeal)) {
                             }
                             return std::nullopt;
                           })
                  .ok());
  EXPECT_EQ(FormsOf(track), Forms{"plain: 200"});
  EXPECT_EQ(compactor_.Resume(), std::nullopt) << "it is not for want of memory";
  Decode(track, 40, 1);
  RunAll();
  EXPECT_EQ(FormsOf(track).front().substr(0, 7), "16 kept");
  EXPECT_EQ(Shown(track), "");
}

// ---- A policy change while work waits

TEST_F(CompactorTest, APromptsEndThatWaitsIsSealedUnderThePolicyThatComes) {
  Track track = NewTrack(SmallMosaic());
  Append(track, 200, 1, true);
  policies::Policy half = SmallMosaic();
  half.text = "another";
  half.mosaic->strategy.kept = {0.5};
  ASSERT_TRUE(compactor_.SetPolicy(*track.sequence, half).ok());
  RunAll();
  EXPECT_EQ(FormsOf(track), Forms{"32 kept: 200"});
  EXPECT_FALSE(ManagedSequence::Of(*track.sequence)->Busy());
}

TEST_F(CompactorTest, APromptsEndThatWaitsStaysAsItIsUnderOneThatSealsNothing) {
  for (const policies::Policy& after : {Quest(), *policies::ParsePolicy("snapkv")}) {
    Track track = NewTrack(SmallMosaic());
    Append(track, 200, 1, true);
    ASSERT_TRUE(compactor_.SetPolicy(*track.sequence, after).ok());
    RunAll();
    EXPECT_EQ(FormsOf(track), Forms{"plain: 200"});
    EXPECT_FALSE(ManagedSequence::Of(*track.sequence)->Busy());
  }
}

// A job of the previous policy holds the lane; a caller under the new policy waits for it.
TEST_F(CompactorTest, LanesAreTheSameUnderEveryPolicy) {
  Track track = NewTrack(SmallMosaic());
  const std::shared_ptr<ManagedSequence> before = ManagedSequence::Of(*track.sequence);
  ASSERT_TRUE(compactor_.SetPolicy(*track.sequence, Quest()).ok());
  const std::shared_ptr<ManagedSequence> after = ManagedSequence::Of(*track.sequence);
  ASSERT_NE(before, after);
  EXPECT_EQ(before->lane(0).work, after->lane(0).work);
  Track fork = Fork(track);
  EXPECT_NE(ManagedSequence::Of(*fork.sequence)->lane(0).work, after->lane(0).work);
}

}  // namespace
}  // namespace tessera::compaction
