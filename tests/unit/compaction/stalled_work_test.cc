// What finds no memory waits its turn and comes again; so does what meets a policy that is new.

#include "daemon/compaction/stalled_work.h"

#include <chrono>

#include "daemon/policies/parse.h"
#include "tests/unit/compaction/compactor_fixture.h"

namespace tessera::compaction {
namespace {

using std::chrono::milliseconds;

constexpr TenantId kOne{1};
constexpr TenantId kOther{2};

StalledWork::Item ItemOf(TenantId tenant, std::uint32_t lane) {
  return {.tenant = tenant, .sequence = {}, .first = lane};
}

TEST(StalledWork, OneOfALineIsTriedAtATimeAndTheOthersFollowAtOnce) {
  StalledWork work;
  const Clock::TimePoint start{};
  EXPECT_FALSE(work.Any(kOne));
  EXPECT_EQ(work.DueIn(start), std::nullopt);
  EXPECT_TRUE(work.Add(ItemOf(kOne, 1), start));
  EXPECT_FALSE(work.Add(ItemOf(kOne, 2), start)) << "it waits behind the first";
  EXPECT_TRUE(work.Any(kOne));
  EXPECT_FALSE(work.Any(kOther));
  EXPECT_EQ(work.DueIn(start), StalledWork::kFirstPause);
  EXPECT_TRUE(work.TakeDue(start + StalledWork::kFirstPause - milliseconds(1)).empty());
  const std::vector<StalledWork::Item> due = work.TakeDue(start + StalledWork::kFirstPause);
  ASSERT_EQ(due.size(), 1u);
  EXPECT_EQ(due[0].first, 1u);
  EXPECT_TRUE(work.TakeDue(start + std::chrono::hours(1)).empty()) << "it has not been answered";
  EXPECT_EQ(work.DueIn(start), std::nullopt);
  const std::optional<StalledWork::Item> next = work.Found(kOne);
  ASSERT_TRUE(next.has_value());
  EXPECT_EQ(next->first, 2u);
  EXPECT_TRUE(work.Any(kOne)) << "it is being tried";
  EXPECT_EQ(work.Found(kOne), std::nullopt);
  EXPECT_FALSE(work.Any(kOne));
}

TEST(StalledWork, PausesDoubleUntilOneFindsMemory) {
  StalledWork work;
  Clock::TimePoint now{};
  Clock::Duration pause = StalledWork::kFirstPause;
  ASSERT_TRUE(work.Add(ItemOf(kOne, 0), now));
  for (int round = 0; round < 12; ++round) {
    ASSERT_EQ(work.DueIn(now), pause) << round;
    now += pause;
    ASSERT_EQ(work.TakeDue(now).size(), 1u);
    ASSERT_TRUE(work.Add(ItemOf(kOne, 0), now)) << "somebody must look again";
    pause = std::min(2 * pause, StalledWork::kLongestPause);
  }
  EXPECT_EQ(pause, StalledWork::kLongestPause);
  ASSERT_EQ(work.TakeDue(now + pause).size(), 1u);
  EXPECT_EQ(work.Found(kOne), std::nullopt);
  ASSERT_TRUE(work.Add(ItemOf(kOne, 0), now));
  EXPECT_EQ(work.DueIn(now), StalledWork::kFirstPause);
}

TEST(StalledWork, WhatFailsGoesBehindTheOthersAndTenantsDoNotWaitForEachOther) {
  StalledWork work;
  const Clock::TimePoint start{};
  work.Add(ItemOf(kOne, 1), start);
  work.Add(ItemOf(kOne, 2), start);
  EXPECT_TRUE(work.Add(ItemOf(kOther, 3), start + milliseconds(5)));
  EXPECT_EQ(work.TakeDue(start + StalledWork::kFirstPause).size(), 1u);
  EXPECT_EQ(work.DueIn(start + StalledWork::kFirstPause), milliseconds(5));
  work.Add(ItemOf(kOne, 1), start + StalledWork::kFirstPause);
  const Clock::TimePoint later = start + std::chrono::seconds(1);
  const std::vector<StalledWork::Item> due = work.TakeDue(later);
  ASSERT_EQ(due.size(), 2u);
  EXPECT_EQ(due[0].first, 2u);
  EXPECT_EQ(due[1].first, 3u);
}

// ---- through the compactor

class WithoutMemory : public CompactorTest {
 protected:
  static constexpr std::uint64_t kLimit = 4 << 20;
  WithoutMemory() : CompactorTest(0, kLimit) {}
  pool::Charge Squeeze(std::uint64_t room) {
    auto& account = const_cast<pool::Account&>(world_.tenant().account());
    return *account.Reserve(pool::MemoryTag::kPoolExtents, kLimit - account.used_bytes() - room);
  }
  // As the daemon's watcher does, until nothing is due.
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
    // Nor does each that comes meanwhile try by itself.
    const std::uint64_t tried = counters().strategies_made;
    Track late = NewTrack(SmallMosaic());
    compactor_.Appended(track.sequence, {0, 1, true});
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

TEST_F(WithoutMemory, AChoiceIsMadeWhenThereIsSome) {
  const absl::StatusOr<policies::Policy> policy =
      policies::ParsePolicy("streaming:sink=4,recent=60");
  ASSERT_TRUE(policy.ok()) << policy.status();
  Track track = NewTrack(*policy);
  Append(track, 200, 1, true);
  {
    const pool::Charge rest = Squeeze(1024);
    RunAll();
    EXPECT_EQ(FormsOf(track), Forms{"plain: 200"});
    ResumeAfter(std::chrono::seconds(5));
    EXPECT_EQ(FormsOf(track), Forms{"plain: 200"});
  }
  ResumeAfter(std::chrono::seconds(5));
  const cache::SequenceView view = View(track);
  std::uint64_t entries = 0;
  for (std::uint32_t i = 0; i < view.lanes[0].resolved.segments; ++i) {
    entries += view.segments[i].entries;
  }
  EXPECT_EQ(entries, 64u);
  EXPECT_EQ(compactor_.Resume(), std::nullopt);
}

// ---- another policy while work waits

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

// A job of the policy before has the lane; whoever asks under the new one waits for it.
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
