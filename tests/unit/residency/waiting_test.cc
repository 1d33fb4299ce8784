// Calls that wait for room: for which sequences, for how long, and in which order.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/residency/pressure_fixture.h"

namespace tessera::residency {
namespace {

using cache::Sequence;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

TEST_F(PressureTest, ACallWaitsForASequenceToBecomeIdle) {
  Build({{.hard = 4 * kMiB}});
  const auto sequences = Fill(0, 3);
  // Used one second apart, the last one now: the first is idle after at most one more second.
  const Clock::TimePoint begun = clock_.Now();
  ASSERT_TRUE(AddWithRelief(0).ok());
  EXPECT_LE(clock_.Now() - begun, seconds(2));
  EXPECT_EQ(Gone(sequences)[0], '-');
}

// No sequence is ever idle, yet every call proceeds.
TEST_F(PressureTest, ACallNeedsOnlySequencesThatAreNotInUse) {
  at_work_ = milliseconds(20);
  Build({{.hard = 4 * kMiB}});
  std::vector<std::shared_ptr<Sequence>> sequences(9);
  for (auto& sequence : sequences) {
    ASSERT_TRUE(AddWithRelief(0, &sequence).ok());
    clock_.Advance(milliseconds(7));
  }
  const Clock::TimePoint begun = clock_.Now();
  for (int turn = 0; turn < 100; ++turn) {
    const absl::Status status = pressure_->RetryWhenPoolFull(
        tenant(0), [&] { return sequences[turn % 9]->Restore().status(); }, [] { return false; });
    ASSERT_TRUE(status.ok()) << status;
    clock_.Advance(milliseconds(1));
  }
  EXPECT_EQ(pressure_->counters().refused.load(), 0u);
  EXPECT_LT(clock_.Now() - begun, 100 * at_work_) << "and waits no longer than for that";
  // In the background they are left alone.
  const std::string gone = Gone(sequences);
  EXPECT_GT(scheduler_.RunAll("relieve"), 0);
  EXPECT_EQ(Gone(sequences), gone);
}

// Each batch is larger than half of the memory, so that room for one takes it from the other.
TEST_F(PressureTest, TwoBatchesThatFitOneAtATimeTakeTurns) {
  at_work_ = milliseconds(20);
  patience_ = std::chrono::hours(1);  // the waiting thread moves the clock while the other works
  Build({{.hard = 8 * kMiB}});
  std::vector<std::shared_ptr<Sequence>> sequences(12);
  for (auto& sequence : sequences) ASSERT_TRUE(AddWithRelief(0, &sequence).ok());
  on_pause_ = [] { std::this_thread::yield(); };
  const auto decode = [&](std::size_t first) {
    for (int round = 0; round < 3000; ++round) {
      const absl::Status status = pressure_->RetryWhenPoolFull(
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

// Batches that never rest: a call that has waited for long gets its turn all the same.
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
              AllOf(HasSubstr("3 sequences are in use or not idle"), HasSubstr("Retry in ")));
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

// A tenant whose sequences are never idle, and whose calls wait for that all the time.
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
    (void)AddWithRelief(0);  // one more waiting call, while there are places
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

}  // namespace
}  // namespace tessera::residency
