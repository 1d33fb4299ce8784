// The ladder: who is made to pay, in which order, and what a call is told where nobody can.

#include "daemon/residency/pressure.h"

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/base/bytes.h"
#include "daemon/residency/offload_idle.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/fakes/manual_scheduler.h"
#include "tests/unit/cache/world.h"

namespace tessera::residency {
namespace {

using cache::Sequence;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

constexpr std::uint64_t kNode = 16 * kMiB;
constexpr Clock::Duration kIdle = seconds(3);
constexpr std::uint64_t kTokens = 1000;  // of a sequence: about 1 MiB

struct Limits {
  std::uint64_t soft = 0;
  std::uint64_t hard = 0;
};

class PressureTest : public testing::Test {
 protected:
  void Build(const std::vector<Limits>& tenants, std::uint64_t tier = 64 * kMiB,
             std::vector<std::unique_ptr<Measure>> before = {}) {
    cache::Node::Options options = {
        .memory_bytes = kNode, .host_tier_bytes = tier, .device = &device_, .max_sessions = 8};
    for (const Limits& limits : tenants) {
      const std::string name = "t" + std::to_string(options.tenants.size());
      options.tenants.push_back({.name = name,
                                 .token = name,
                                 .hard_limit_bytes = limits.hard,
                                 .soft_limit_bytes = limits.soft});
    }
    options.tenant_template = {.pool_extent_bytes = cache::kTestPoolExtent,
                               .directory_extent_bytes = cache::kTestDirectoryExtent,
                               .ring_tiles = 2,
                               .staging_bytes = cache::kTestStaging,
                               .tail_extent_bytes = cache::kTestTailExtent,
                               .max_models = 4,
                               .max_sequences = 1000,
                               .pin_limit = seconds(5),
                               .clock = &clock_,
                               .on_attention = [] {}};
    auto node = cache::Node::Create(options);
    ASSERT_TRUE(node.ok()) << node.status();
    node_ = *std::move(node);
    Pressure::Options ladder = {.node = node_.get(),
                                .scheduler = &scheduler_,
                                .logger = &logger_,
                                .clock = &clock_,
                                .pause = [this](Clock::Duration time) {
                                  ++pauses_;
                                  if (on_pause_) on_pause_();
                                  clock_.Advance(time);
                                }};
    if (patience_.has_value()) ladder.patience = *patience_;
    ladder.ladder = std::move(before);
    ladder.ladder.push_back(std::make_unique<OffloadIdle>(OffloadIdle::Options{
        .clock = &clock_, .tier = &node_->host_tier(), .idle = kIdle, .at_work = at_work_}));
    pressure_.emplace(std::move(ladder));
    for (std::size_t i = 0; i < tenants.size(); ++i) {
      auto session = tenant(i).OpenSession({.worker_name = "test"});
      ASSERT_TRUE(session.ok()) << session.status();
      sessions_.push_back(*session);
      auto model = tenant(i).RegisterModel(cache::SmallModel("m", 2, 2), (*session)->id());
      ASSERT_TRUE(model.ok());
      models_.push_back(*model);
    }
  }
  void TearDown() override {
    for (std::size_t i = 0; i < sessions_.size(); ++i) tenant(i).EndSession(sessions_[i]->id());
    sessions_.clear();
    for (std::size_t i = 0; i < models_.size(); ++i) {
      tenant(i).epochs().Collect();
      EXPECT_EQ(tenant(i).account().used_bytes(), 0u);
      EXPECT_EQ(tenant(i).offloaded().used_bytes(), 0u);
    }
    EXPECT_EQ(node_->host_tier().used_bytes(), 0u);
  }
  cache::Tenant& tenant(std::size_t i) { return *node_->tenants()[i]; }

  // One more sequence, which may be refused.
  absl::Status Add(std::size_t i, std::shared_ptr<Sequence>* out = nullptr,
                   std::uint64_t tokens = kTokens) {
    auto sequence = tenant(i).CreateSequence(*sessions_[i], models_[i]->id());
    if (!sequence.ok()) return sequence.status();
    const absl::Status status = cache::AppendAll(**sequence, 0, cache::NewStamps(tokens)).status();
    if (!status.ok()) {
      (void)tenant(i).FreeSequence((*sequence)->id());
    } else if (out != nullptr) {
      *out = *sequence;
    }
    return status;
  }
  // So many, a second apart.
  std::vector<std::shared_ptr<Sequence>> Fill(std::size_t i, int count) {
    std::vector<std::shared_ptr<Sequence>> sequences(count);
    for (auto& sequence : sequences) {
      EXPECT_TRUE(Add(i, &sequence).ok());
      clock_.Advance(seconds(1));
    }
    return sequences;
  }
  absl::Status AddWithRelief(std::size_t i, std::shared_ptr<Sequence>* out = nullptr) {
    return pressure_->WithRelief(
        tenant(i), [&] { return Add(i, out); }, [this] { return gone_; });
  }
  static std::string Gone(const std::vector<std::shared_ptr<Sequence>>& sequences) {
    std::string text;
    for (const auto& sequence : sequences) text += sequence->offloaded() ? '-' : 'x';
    return text;
  }
  std::uint64_t Climbs(Outcome outcome, std::size_t rung = 0) {
    return pressure_->counters().climbs[rung][static_cast<std::size_t>(outcome)].load();
  }

  FakeClock clock_;
  ManualScheduler scheduler_;
  Logger logger_{LogOptions{.level = LogLevel::kOff}};
  device::CpuDevice device_{kernels::BestImplementation()};
  std::unique_ptr<cache::Node> node_;
  std::optional<Pressure> pressure_;
  std::vector<std::shared_ptr<cache::SessionState>> sessions_;
  std::vector<std::shared_ptr<const cache::Model>> models_;
  std::atomic<int> pauses_{0};
  std::function<void()> on_pause_;
  bool gone_ = false;
  Clock::Duration at_work_ = kIdle;
  std::optional<Clock::Duration> patience_;
};

TEST_F(PressureTest, TheLongestIdleGoFirstAndNoMoreThanNeeded) {
  Build({{.hard = 8 * kMiB}});
  auto sequences = Fill(0, 6);
  sequences[1]->Restore()->Reset();  // used now
  clock_.Advance(kIdle);
  sequences[4]->Restore()->Reset();  // within the idle time of what follows
  std::shared_ptr<Sequence> last;
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(AddWithRelief(0, &last).ok());
  const std::string gone = Gone(sequences);
  EXPECT_EQ(gone[0], '-');  // the longest idle
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
              AllOf(HasSubstr("tenant t0: "), HasSubstr("asked for"),
                    HasSubstr("used of a limit of 4.0 MiB"),
                    HasSubstr("3 sequences are in use, or not idle"), HasSubstr("Retry in ")));
  EXPECT_EQ(Gone(sequences), "xxx");
  tenant(0).epochs().Collect();
  EXPECT_EQ(tenant(0).account().used_bytes(), before);
  EXPECT_EQ(pressure_->counters().refused.load(), 1u);
  EXPECT_GT(Climbs(Outcome::kNothing), 0u);
}

TEST_F(PressureTest, ACallWaitsForASequenceToBecomeIdle) {
  Build({{.hard = 4 * kMiB}});
  const auto sequences = Fill(0, 3);
  // A second each, and the last one now: the first is idle after one second more at the latest.
  const Clock::TimePoint begun = clock_.Now();
  ASSERT_TRUE(AddWithRelief(0).ok());
  EXPECT_LE(clock_.Now() - begun, seconds(2));
  EXPECT_EQ(Gone(sequences)[0], '-');
}

// Nobody's turn comes to an end, or ever leaves anything idle: everybody goes on all the same.
TEST_F(PressureTest, ACallNeedsNobodyToBeIdleOnlyNotAtWork) {
  at_work_ = milliseconds(20);
  Build({{.hard = 4 * kMiB}});
  std::vector<std::shared_ptr<Sequence>> sequences(9);
  for (auto& sequence : sequences) {
    ASSERT_TRUE(AddWithRelief(0, &sequence).ok());
    clock_.Advance(milliseconds(7));
  }
  const Clock::TimePoint begun = clock_.Now();
  for (int turn = 0; turn < 100; ++turn) {
    const absl::Status status = pressure_->WithRelief(
        tenant(0), [&] { return sequences[turn % 9]->Restore().status(); }, [] { return false; });
    ASSERT_TRUE(status.ok()) << status;
    clock_.Advance(milliseconds(1));
  }
  EXPECT_EQ(pressure_->counters().refused.load(), 0u);
  EXPECT_LT(clock_.Now() - begun, 100 * at_work_) << "and waits no longer than for that";
  // In the background they are let be.
  const std::string gone = Gone(sequences);
  EXPECT_GT(scheduler_.RunAll("relieve"), 0);
  EXPECT_EQ(Gone(sequences), gone);
}

// Each is larger than half of what there is, so that what one finds room for the other has lost.
TEST_F(PressureTest, TwoBatchesThatFitOneAtATimeTakeTurns) {
  at_work_ = milliseconds(20);
  patience_ = std::chrono::hours(1);  // whoever waits moves the clock while the other works
  Build({{.hard = 8 * kMiB}});
  std::vector<std::shared_ptr<Sequence>> sequences(12);
  for (auto& sequence : sequences) ASSERT_TRUE(AddWithRelief(0, &sequence).ok());
  on_pause_ = [] { std::this_thread::yield(); };
  const auto decode = [&](std::size_t first) {
    for (int round = 0; round < 3000; ++round) {
      const absl::Status status = pressure_->WithRelief(
          tenant(0),
          [&] {
            std::vector<cache::Residence> batch;
            for (std::size_t i = first; i < first + 6; ++i) {
              auto residence = sequences[i]->Restore();
              if (!residence.ok()) return residence.status();
              batch.push_back(*std::move(residence));
            }
            return absl::OkStatus();
          },
          [] { return false; });
      EXPECT_TRUE(status.ok()) << "batch " << first << ", round " << round << ": " << status;
      if (!status.ok()) return;
    }
  };
  std::thread other([&] { decode(6); });
  decode(0);
  other.join();
}

// Batches that never rest: whoever waits for long has its turn all the same.
TEST_F(PressureTest, ACallThatIsOverdueFindsNobodyTooBusy) {
  Build({{.hard = 4 * kMiB}});
  const auto sequences = Fill(0, 3);
  on_pause_ = [&] {
    for (const auto& sequence : sequences) {
      if (!sequence->offloaded()) sequence->Restore()->Reset();
    }
  };
  on_pause_();
  const Clock::TimePoint begun = clock_.Now();
  const absl::Status status = AddWithRelief(0);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_GE(clock_.Now() - begun, seconds(1));
  EXPECT_LE(clock_.Now() - begun, seconds(2));
  EXPECT_THAT(Gone(sequences), HasSubstr("-"));
}

TEST_F(PressureTest, NobodyWaitsLongerThanItsPatience) {
  Build({{.hard = 4 * kMiB}});
  std::vector<cache::Residence> used;
  for (const auto& sequence : Fill(0, 3)) used.push_back(*sequence->Restore());
  const Clock::TimePoint begun = clock_.Now();
  const absl::Status refused = AddWithRelief(0);
  EXPECT_THAT(refused.ToString(),
              AllOf(HasSubstr("3 sequences are in use, or not idle"), HasSubstr("Retry in ")));
  EXPECT_GE(clock_.Now() - begun, seconds(2));
  EXPECT_LE(clock_.Now() - begun, seconds(2) + milliseconds(2));
}

TEST_F(PressureTest, ACallWaitsForReadersOfWhatItMovedOut) {
  Build({{.hard = 4 * kMiB}});
  const auto sequences = Fill(0, 3);
  clock_.Advance(10 * kIdle);
  shm::Word& slot = sessions_[0]->control()->page().readers[0].word;
  const std::uint64_t pin = shm::Pin(slot, tenant(0).epochs().epoch());
  on_pause_ = [&] {
    if (pauses_ == 5) (void)shm::Unpin(slot, pin);
  };
  ASSERT_TRUE(AddWithRelief(0).ok());
  EXPECT_GE(pauses_, 5);
  EXPECT_LT(pauses_, 20);
}

TEST_F(PressureTest, NoCallWaitsForAnotherTenantsReaders) {
  Build({{.hard = 4 * kMiB}, {.hard = 8 * kMiB}});
  const auto sequences = Fill(0, 3);
  const auto others = Fill(1, 1);
  clock_.Advance(10 * kIdle);
  shm::Word& slot = sessions_[1]->control()->page().readers[0].word;
  const std::uint64_t pin = shm::Pin(slot, tenant(1).epochs().epoch());
  ASSERT_TRUE(tenant(1).FreeSequence(others[0]->id()).ok());
  ASSERT_GT(tenant(1).epochs().waiting_bytes(), 0u);
  ASSERT_TRUE(AddWithRelief(0).ok());
  EXPECT_EQ(pauses_, 0);
  (void)shm::Unpin(slot, pin);
}

// One whose sequences are never idle, and whose calls wait for that all the time.
TEST_F(PressureTest, NoTenantTakesEveryPlaceToWait) {
  at_work_ = milliseconds(20);
  Build({{.hard = 4 * kMiB}, {.hard = 4 * kMiB}});
  const auto greedy = Fill(0, 3);
  const auto modest = Fill(1, 3);
  const auto use = [](const std::vector<std::shared_ptr<Sequence>>& sequences) {
    for (const auto& sequence : sequences) sequence->Restore()->Reset();
  };
  use(modest);  // and idle in 20 ms
  use(greedy);
  std::optional<absl::Status> of_modest;
  on_pause_ = [&] {
    use(greedy);
    if (of_modest.has_value()) return;
    (void)AddWithRelief(0);  // one more that waits, while there are places
    if (!of_modest.has_value()) of_modest = AddWithRelief(1);
  };
  (void)AddWithRelief(0);
  ASSERT_TRUE(of_modest.has_value());
  EXPECT_TRUE(of_modest->ok()) << *of_modest;
}

TEST_F(PressureTest, WhoeverIsGoneWaitsForNothing) {
  Build({{.hard = 4 * kMiB}});
  Fill(0, 3);
  gone_ = true;
  EXPECT_EQ(AddWithRelief(0).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(pauses_, 0);
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

TEST_F(PressureTest, WithoutATierItSaysSo) {
  Build({{.hard = 4 * kMiB}}, /*tier=*/0);
  Fill(0, 3);
  clock_.Advance(10 * kIdle);
  EXPECT_THAT(AddWithRelief(0).ToString(), HasSubstr("host_tier_bytes is 0"));
  EXPECT_EQ(pauses_, 0);
}

// ---- watermarks

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
  EXPECT_GE(tenant(0).account().used_bytes(), 8 * kMiB * 75 / 100);  // and no further
  EXPECT_TRUE(sequences.front()->offloaded());
  EXPECT_FALSE(sequences.back()->offloaded());
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

// ---- fairness

TEST_F(PressureTest, WhoIsAboveItsSoftLimitPaysFirst) {
  Build({{.soft = 2 * kMiB}, {.soft = 14 * kMiB}});
  const auto greedy = Fill(0, 5);
  const auto modest = Fill(1, 6);
  clock_.Advance(10 * kIdle);
  greedy.back()->Restore()->Reset();
  clock_.Advance(2 * kIdle);  // of both the greedy one's last is the one used last
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(AddWithRelief(1).ok());
  EXPECT_EQ(Gone(modest), "xxxxxx");
  EXPECT_THAT(Gone(greedy), HasSubstr("-"));
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

// ---- rungs

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
  const absl::Status status = pressure_->WithRelief(
      tenant(0),
      [&] {
        // Room has come from elsewhere when it is tried again.
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
    EXPECT_EQ(pressure_->WithRelief(
                  tenant(0), [&] { return status; }, [] { return false; }),
              status);
  }
  EXPECT_TRUE(asked.empty());
}

}  // namespace
}  // namespace tessera::residency
