// Memory pressure: whose memory is freed, in which order, and the answer to a call if none can be
// freed.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <span>

#include "tests/unit/residency/pressure_fixture.h"

namespace tessera::residency {
namespace {

using cache::Sequence;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

TEST_F(PressureTest, TheLongestIdleGoFirstAndNoMoreThanNeeded) {
  Build({{.hard = 8 * kMiB}});
  auto sequences = Fill(0, 6);
  sequences[1]->Restore()->Reset();  // used now
  clock_.Advance(kIdle);
  sequences[4]->Restore()->Reset();  // within the idle time of what follows
  std::shared_ptr<Sequence> last;
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(AddWithRelief(0, &last).ok());
  const std::string gone = Gone(sequences);
  EXPECT_EQ(gone[0], '-');  // idle for the longest time
  EXPECT_EQ(gone[1], 'x');
  EXPECT_EQ(gone[4], 'x');
  EXPECT_EQ(gone[5], 'x');
  EXPECT_GT(Climbs(Outcome::kEnough), 0u);
  EXPECT_GT(pressure_->counters().served.load(), 0u);
  EXPECT_EQ(pressure_->counters().refused.load(), 0u);
}

TEST_F(PressureTest, WhatIsUsedStaysAndTheCallerIsToldTheFigures) {
  Build({{.hard = 4 * kMiB}});
  const auto sequences = Fill(0, 3);
  std::vector<cache::Residence> used;
  for (const auto& sequence : sequences) used.push_back(*sequence->Restore());
  clock_.Advance(10 * kIdle);
  const std::uint64_t before = tenant(0).account().used_bytes();
  const absl::Status refused = AddWithRelief(0);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(refused.ToString(),
              AllOf(HasSubstr("tenant t0: "), HasSubstr("requested for"),
                    HasSubstr("used of a limit of 4.0 MiB"),
                    HasSubstr("3 sequences are in use or not idle"), HasSubstr("Retry in ")));
  EXPECT_EQ(Gone(sequences), "xxx");
  tenant(0).epochs().Collect();
  EXPECT_EQ(tenant(0).account().used_bytes(), before);
  EXPECT_EQ(pressure_->counters().refused.load(), 1u);
  EXPECT_EQ(pressure_->refusals(tenant(0)).quota.load(), 1u);
  EXPECT_EQ(pressure_->refusals(tenant(0)).node.load(), 0u);
  EXPECT_GT(Climbs(Outcome::kNothing), 0u);
}

TEST_F(PressureTest, AFullTierIsWhatTheCallerIsTold) {
  Build({{.hard = 8 * kMiB}}, /*tier=*/2 * kMiB);
  const auto sequences = Fill(0, 6);
  clock_.Advance(10 * kIdle);
  absl::Status status;
  int added = 0;
  for (; added < 10 && status.ok(); ++added) {
    status = AddWithRelief(0);
    clock_.Advance(milliseconds(1));
  }
  EXPECT_GT(added, 1);
  EXPECT_THAT(status.ToString(), AllOf(HasSubstr("the host tier is full"), HasSubstr("of 2.0 MiB"),
                                       HasSubstr("Retry in ")));
  EXPECT_GE(node_->host_tier().used_bytes(), kMiB);
}

// Each tenant has an equal part, however many tenants there are.
TEST_F(PressureTest, ATenantLeavesOthersTheirPartOfTheTier) {
  Build({{.hard = 6 * kMiB}, {.hard = 4 * kMiB}, {.hard = 4 * kMiB}}, /*tier=*/9 * kMiB);
  const auto greedy = Fill(0, 4);
  clock_.Advance(10 * kIdle);
  absl::Status status;
  for (int added = 0; added < 20 && status.ok(); ++added) {
    status = AddWithRelief(0);
    clock_.Advance(10 * kIdle);
  }
  EXPECT_THAT(status.ToString(), AllOf(HasSubstr("the tenant's share of the host tier is full"),
                                       HasSubstr("of 3.0 MiB"), HasSubstr("Retry in ")));
  EXPECT_LE(tenant(0).offloaded().used_bytes(), 3 * kMiB);
  EXPECT_GE(tenant(0).offloaded().used_bytes(), 2 * kMiB);
  for (const std::size_t other : {1u, 2u}) {
    const auto modest = Fill(other, 2);
    clock_.Advance(10 * kIdle);
    for (int i = 0; i < 2; ++i) EXPECT_TRUE(AddWithRelief(other).ok());
    EXPECT_THAT(Gone(modest), HasSubstr("-"));
  }
}

TEST_F(PressureTest, WithoutATierItSaysSo) {
  Build({{.hard = 4 * kMiB}}, /*tier=*/0);
  Fill(0, 3);
  clock_.Advance(10 * kIdle);
  EXPECT_THAT(AddWithRelief(0).ToString(), HasSubstr("host_tier_bytes is 0"));
  EXPECT_EQ(pauses_, 0);
}

// ---- Watermarks

TEST_F(PressureTest, AboveTheHighMarkAJobGoesBelowTheLowOne) {
  Build({{.hard = 8 * kMiB}});
  std::vector<std::shared_ptr<Sequence>> sequences;
  while (tenant(0).account().used_bytes() < 8 * kMiB * 88 / 100) {
    ASSERT_TRUE(Add(0, &sequences.emplace_back(), 100).ok());
    clock_.Advance(milliseconds(1));
  }
  EXPECT_THAT(scheduler_.Queued(), testing::IsEmpty());
  while (tenant(0).account().used_bytes() <= 8 * kMiB * 90 / 100) {
    ASSERT_TRUE(Add(0, &sequences.emplace_back(), 100).ok());
  }
  EXPECT_THAT(scheduler_.Queued(), testing::ElementsAre("relieve"));
  EXPECT_EQ(scheduler_.QueuedSpecs().front().priority, JobPriority::kPressure);
  clock_.Advance(2 * kIdle);
  scheduler_.RunAll("relieve");
  tenant(0).epochs().Collect();
  EXPECT_LE(tenant(0).account().used_bytes(), 8 * kMiB * 80 / 100);
  EXPECT_GE(tenant(0).account().used_bytes(), 8 * kMiB * 75 / 100);  // and not below
  EXPECT_TRUE(sequences.front()->offloaded());
  EXPECT_FALSE(sequences.back()->offloaded());
}

TEST_F(PressureTest, ASmallerLimitIsMetInTheBackground) {
  Build({{.hard = 8 * kMiB}});
  std::vector<std::shared_ptr<Sequence>> sequences;
  while (tenant(0).account().used_bytes() < 6 * kMiB) {
    ASSERT_TRUE(Add(0, &sequences.emplace_back(), 100).ok());
  }
  clock_.Advance(2 * kIdle);
  EXPECT_THAT(scheduler_.Queued(), testing::IsEmpty());
  ASSERT_TRUE(
      node_->SetTenants({{.name = "t0", .token = "t0", .hard_limit_bytes = 4 * kMiB}}).ok());
  pressure_->WatchTenants();
  EXPECT_THAT(scheduler_.Queued(), testing::ElementsAre("relieve"));
  scheduler_.RunAll("relieve");
  tenant(0).epochs().Collect();
  EXPECT_LE(tenant(0).account().used_bytes(), 4 * kMiB * 80 / 100);
}

TEST_F(PressureTest, AJobThatFindsNothingIsNotQueuedAgainAtOnce) {
  Build({{.hard = 8 * kMiB}}, /*tier=*/0);
  while (Add(0, nullptr, 100).ok()) {
  }
  EXPECT_EQ(scheduler_.RunAll("relieve"), 1);
  for (int i = 0; i < 10; ++i) (void)Add(0, nullptr, 100);
  EXPECT_THAT(scheduler_.Queued(), testing::IsEmpty());
  clock_.Advance(seconds(1));
  (void)Add(0, nullptr, 100);
  EXPECT_THAT(scheduler_.Queued(), testing::ElementsAre("relieve"));
  scheduler_.RunAll("relieve");
}

// ---- Fairness

TEST_F(PressureTest, WhoIsAboveItsSoftLimitPaysFirst) {
  Build({{.soft = 2 * kMiB}, {.soft = 14 * kMiB}});
  const auto greedy = Fill(0, 5);
  const auto modest = Fill(1, 6);
  clock_.Advance(10 * kIdle);
  greedy.back()->Restore()->Reset();
  clock_.Advance(2 * kIdle);  // the greedy tenant's last sequence was used last of all
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(AddWithRelief(1).ok());
  EXPECT_EQ(Gone(modest), "xxxxxx");
  EXPECT_THAT(Gone(greedy), HasSubstr("-"));
}

TEST_F(PressureTest, WhoIsWithinItsPartPaysNothingForOthers) {
  Build({{.reserved = 8 * kMiB}, {.reserved = kMiB}, {.reserved = 2 * kMiB}});
  const auto modest = Fill(0, 5);  // uses most, and was idle for longest
  const auto greedy = Fill(1, 4);
  clock_.Advance(10 * kIdle);
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(AddWithRelief(2).ok()) << i;
  EXPECT_EQ(Gone(modest), "xxxxx");
  EXPECT_THAT(Gone(greedy), HasSubstr("-"));
}

// What a stage can free, and the order in which stages are tried.
class Cheap final : public Measure {
 public:
  Cheap(std::string name, std::uint64_t bytes, std::vector<std::string>* asked)
      : name_(std::move(name)), bytes_(bytes), asked_(asked) {}
  std::string_view name() const override { return name_; }
  Relief RelievePressure(cache::Tenant& tenant, const Need&) override {
    asked_->push_back(Concat(name_, " of ", tenant.name()));
    return {.bytes = bytes_, .steps = bytes_ > 0 ? 1u : 0u, .hindrance = "that was all"};
  }

 private:
  const std::string name_;
  const std::uint64_t bytes_;
  std::vector<std::string>* const asked_;
};

TEST_F(PressureTest, CheapMeasuresOfOthersComeFirst) {
  std::vector<std::string> asked;
  std::vector<std::unique_ptr<Measure>> rungs;
  rungs.push_back(std::make_unique<Cheap>("first", 0, &asked));
  rungs.push_back(std::make_unique<Cheap>("second", 0, &asked));
  Build({{}, {}}, 64 * kMiB, std::move(rungs));
  Fill(0, 8);
  Fill(1, 5);
  while (Add(1).ok()) {
  }
  asked.clear();
  EXPECT_TRUE(AddWithRelief(0).ok()) << "sequences go out behind these rungs";
  ASSERT_GE(asked.size(), 4u);
  const std::span<const std::string> order(asked);
  EXPECT_THAT(order.first(2), testing::UnorderedElementsAre("first of t0", "first of t1"));
  EXPECT_THAT(order.subspan(2, 2), testing::UnorderedElementsAre("second of t0", "second of t1"));
}

// All steps are counted and logged, although the log is rate-limited.
TEST_F(PressureTest, EveryStepIsCountedAndSaidWithItsReason) {
  Build({{.hard = 8 * kMiB}});
  const auto sequences = Fill(0, 6);
  clock_.Advance(10 * kIdle);
  for (int i = 0; i < 7; ++i) {
    ASSERT_TRUE(AddWithRelief(0).ok());
    clock_.Advance(i == 5 ? milliseconds(1100) : milliseconds(1));
  }
  const Pressure::Counters::Rung& rung = pressure_->counters().rungs[0];
  EXPECT_GE(rung.steps.load(), 4u);
  std::uint64_t steps = 0;
  for (const std::string& line : Logged("memory pressure")) {
    EXPECT_THAT(line, AllOf(HasSubstr("reason=\"tenant t0 had no"), HasSubstr("rung=offload"),
                            HasSubstr("tenant=t0")));
    steps += FieldOf(line, "steps");
    EXPECT_GT(FieldOf(line, "moved_bytes"), 0u);
  }
  EXPECT_EQ(steps, rung.steps.load());
  EXPECT_THAT(Logged("call refused: no memory could be freed"), testing::IsEmpty());
}

// A log line covers steps with one reason.
TEST_F(PressureTest, StepsOfTwoReasonsAreSaidApart) {
  Build({{.hard = 8 * kMiB}});
  while (Add(0, nullptr, 100).ok()) {
  }
  clock_.Advance(2 * kIdle);
  const auto little = [&] { return Add(0, nullptr, 150); };
  ASSERT_TRUE(pressure_->RetryWhenPoolFull(tenant(0), little, [] { return false; }).ok());
  EXPECT_EQ(scheduler_.RunAll("relieve"), 1) << "in the same second";
  pressure_.reset();  // logs the rest
  std::map<std::string, std::uint64_t> steps;
  for (const std::string& line : Logged("memory pressure")) {
    for (const std::string reason : {"tenant t0 had no room for", "above its high watermark"}) {
      if (line.find(reason) != std::string::npos) steps[reason] += FieldOf(line, "steps");
    }
  }
  EXPECT_GT(steps["tenant t0 had no room for"], 0u);
  EXPECT_GT(steps["above its high watermark"], 0u);
}

TEST_F(PressureTest, ACallThatIsRefusedIsSaidWithItsReason) {
  Build({{.hard = 4 * kMiB}}, /*tier=*/0);
  Fill(0, 3);
  for (int i = 0; i < 3; ++i) ASSERT_FALSE(AddWithRelief(0).ok());
  clock_.Advance(seconds(2));
  ASSERT_FALSE(AddWithRelief(0).ok());
  std::uint64_t calls = 0;
  for (const std::string& line : Logged("call refused: no memory could be freed")) {
    EXPECT_THAT(line, AllOf(HasSubstr("tenant=t0"), HasSubstr("host_tier_bytes is 0")));
    EXPECT_EQ(FieldOf(line, "limit_bytes"), 4 * kMiB);
    calls += FieldOf(line, "calls");
  }
  EXPECT_EQ(calls, 4u);
}

TEST_F(PressureTest, WhoIsBelowIsNeverSqueezedForOneAbove) {
  Build({{.soft = 2 * kMiB}, {.soft = 14 * kMiB}});
  const auto modest = Fill(1, 9);
  std::vector<cache::Residence> used;
  std::vector<std::shared_ptr<Sequence>> greedy;
  for (;;) {
    std::shared_ptr<Sequence> one;
    if (!Add(0, &one).ok()) break;
    used.push_back(*one->Restore());
    greedy.push_back(one);
  }
  clock_.Advance(100 * kIdle);
  const absl::Status refused = AddWithRelief(0);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(refused.ToString(), AllOf(HasSubstr("tenant t0"), Not(HasSubstr("tenant t1"))));
  EXPECT_EQ(Gone(modest), "xxxxxxxxx");
  EXPECT_EQ(pressure_->refusals(tenant(0)).node.load(), 1u);
  EXPECT_EQ(pressure_->refusals(tenant(0)).quota.load(), 0u);
  EXPECT_EQ(pressure_->refusals(tenant(1)).node.load(), 0u);
}

// A request above the limit itself is refused without a climb, and counted like any other.
TEST_F(PressureTest, AnImpossibleRequestIsCounted) {
  Build({{.hard = 4 * kMiB}});
  const auto reserve = [&] {
    return tenant(0).account().Reserve(pool::MemoryTag::kTiles, 5 * kMiB).status();
  };
  const absl::Status refused =
      pressure_->RetryWhenPoolFull(tenant(0), reserve, [] { return false; });
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(Climbs(Outcome::kNothing), 0u);
  EXPECT_EQ(pressure_->refusals(tenant(0)).quota.load(), 1u);
  EXPECT_EQ(pressure_->counters().refused.load(), 1u);
}

TEST_F(PressureTest, ATenantsOwnLimitIsItsOwnAffair) {
  Build({{.hard = 4 * kMiB}, {.hard = 12 * kMiB}});
  const auto other = Fill(1, 5);
  const auto own = Fill(0, 3);
  clock_.Advance(10 * kIdle);
  ASSERT_TRUE(AddWithRelief(0).ok());
  EXPECT_EQ(Gone(other), "xxxxx");
  EXPECT_THAT(Gone(own), HasSubstr("-"));
}

// ---- Stages

class FakeRung final : public Measure {
 public:
  FakeRung(std::string name, std::uint64_t gives, std::vector<std::uint64_t>* asked)
      : name_(std::move(name)), gives_(gives), asked_(asked) {}
  std::string_view name() const override { return name_; }
  Relief RelievePressure(cache::Tenant&, const Need& need) override {
    asked_->push_back(need.bytes);
    const std::uint64_t given = std::min(std::exchange(gives_, 0), need.bytes);
    return {.bytes = given, .steps = given > 0, .hindrance = "there is no more of it"};
  }

 private:
  const std::string name_;
  std::uint64_t gives_;
  std::vector<std::uint64_t>* const asked_;
};

TEST_F(PressureTest, ALaterRungIsAskedForWhatIsLeft) {
  std::vector<std::uint64_t> asked;
  std::vector<std::unique_ptr<Measure>> rungs;
  rungs.push_back(std::make_unique<FakeRung>("prefixes", 1000, &asked));
  Build({{.hard = 4 * kMiB}}, 64 * kMiB, std::move(rungs));
  const auto sequences = Fill(0, 3);
  clock_.Advance(10 * kIdle);
  ASSERT_TRUE(AddWithRelief(0).ok());
  ASSERT_FALSE(asked.empty());
  EXPECT_EQ(Climbs(Outcome::kSome, 0), 1u);
  EXPECT_EQ(Climbs(Outcome::kEnough, 1), asked.size());
  EXPECT_THAT(Gone(sequences), HasSubstr("-"));
}

TEST_F(PressureTest, ARungThatGivesEnoughIsTheLast) {
  std::vector<std::uint64_t> asked;
  std::vector<std::unique_ptr<Measure>> rungs;
  rungs.push_back(std::make_unique<FakeRung>("prefixes", ~std::uint64_t{0}, &asked));
  Build({{.hard = 4 * kMiB}}, 64 * kMiB, std::move(rungs));
  const auto sequences = Fill(0, 3);
  clock_.Advance(10 * kIdle);
  int attempts = 0;
  const absl::Status status = pressure_->RetryWhenPoolFull(
      tenant(0),
      [&] {
        // On the second attempt other memory has become free.
        if (++attempts == 2) (void)tenant(0).FreeSequence(sequences[2]->id());
        tenant(0).epochs().Collect();
        return Add(0);
      },
      [] { return false; });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(attempts, 2);
  EXPECT_EQ(Gone({sequences[0], sequences[1]}), "xx");
  EXPECT_EQ(Climbs(Outcome::kEnough, 0), 1u);
}

TEST_F(PressureTest, MemoryThatTheLadderDoesNotKnowIsNotItsAffair) {
  std::vector<std::uint64_t> asked;
  std::vector<std::unique_ptr<Measure>> rungs;
  rungs.push_back(std::make_unique<FakeRung>("prefixes", ~std::uint64_t{0}, &asked));
  Build({{.hard = 4 * kMiB}}, 64 * kMiB, std::move(rungs));
  pool::Account raw("raw copies", 100);
  for (const absl::Status& status :
       {raw.Reserve(pool::MemoryTag::kRawCopies, 101).status(),
        absl::ResourceExhaustedError("64 sessions are attached"), absl::AbortedError("again")}) {
    EXPECT_EQ(pressure_->RetryWhenPoolFull(
                  tenant(0), [&] { return status; }, [] { return false; }),
              status);
  }
  EXPECT_TRUE(asked.empty());
}

}  // namespace
}  // namespace tessera::residency
