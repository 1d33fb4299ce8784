#include "daemon/pool/epochs.h"

#include <array>
#include <memory>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/fakes/fake_clock.h"
#include "tests/fakes/seed.h"

namespace tessera::pool {
namespace {

constexpr std::uint32_t kSlots = 4;
constexpr Clock::Duration kPinLimit = std::chrono::seconds(5);

// One reader session with its slots, as the worker sees them.
struct Session {
  std::array<shm::ReaderSlot, kSlots> slots{};
  std::shared_ptr<PinSource> source = std::make_shared<PinSource>(PinSource{slots.data(), kSlots});
  shm::Word& word(std::uint32_t i) { return slots[i].word; }
};

class EpochsTest : public testing::Test {
 protected:
  // Retires a marker; `freed_` contains it once it has been destroyed.
  void Retire(int marker, std::uint64_t bytes = 100) {
    epochs_.Retire([this, marker] { freed_.push_back(marker); }, bytes);
  }
  bool Freed(int marker) const {
    return std::find(freed_.begin(), freed_.end(), marker) != freed_.end();
  }

  FakeClock clock_;
  shm::Word epoch_{1};
  int attention_ = 0;
  std::vector<int> freed_;
  Session session_;
  Session other_;
  Epochs epochs_{{.epoch = &epoch_, .clock = &clock_, .pin_limit = kPinLimit, .on_waiting = [this] {
                    ++attention_;
                  }}};
};

TEST_F(EpochsTest, NobodyPinnedFreesAtOnce) {
  epochs_.AddSource(session_.source);
  Retire(1);
  EXPECT_TRUE(Freed(1));
  EXPECT_EQ(epoch_.load(), 2u);
  EXPECT_EQ(attention_, 0);
  EXPECT_EQ(epochs_.Collect(), std::nullopt);
}

TEST_F(EpochsTest, OnlyReadersPinnedBeforeBlock) {
  epochs_.AddSource(session_.source);
  const std::uint64_t before = shm::Pin(session_.word(0), epoch_);
  Retire(1);
  EXPECT_FALSE(Freed(1));
  EXPECT_EQ(epochs_.waiting_bytes(), 100u);
  EXPECT_EQ(attention_, 1);
  const std::uint64_t after = shm::Pin(session_.word(1), epoch_);
  EXPECT_NE(epochs_.Collect(), std::nullopt);
  EXPECT_FALSE(Freed(1));
  EXPECT_TRUE(shm::Unpin(session_.word(0), before));
  EXPECT_EQ(epochs_.Collect(), std::nullopt);
  EXPECT_TRUE(Freed(1));  // although slot 1 is still pinned
  EXPECT_EQ(epochs_.waiting_bytes(), 0u);
  Retire(2);
  EXPECT_FALSE(Freed(2));
  EXPECT_TRUE(shm::Unpin(session_.word(1), after));
  epochs_.Collect();
  EXPECT_TRUE(Freed(2));
}

TEST_F(EpochsTest, AReaderThatPinsAgainDoesNotBlockWhatItDoesNotSee) {
  epochs_.AddSource(session_.source);
  const std::uint64_t first = shm::Pin(session_.word(0), epoch_);
  Retire(1);
  EXPECT_TRUE(shm::Unpin(session_.word(0), first));
  const std::uint64_t second = shm::Pin(session_.word(0), epoch_);
  epochs_.Collect();
  EXPECT_TRUE(Freed(1));
  EXPECT_TRUE(shm::Unpin(session_.word(0), second));
}

TEST_F(EpochsTest, BatchesGoInAnyOrder) {
  epochs_.AddSource(session_.source);
  const std::uint64_t old = shm::Pin(session_.word(0), epoch_);
  Retire(1);
  const std::uint64_t young = shm::Pin(session_.word(1), epoch_);
  Retire(2);
  EXPECT_TRUE(shm::Unpin(session_.word(0), old));
  epochs_.Collect();
  EXPECT_TRUE(Freed(1));
  EXPECT_FALSE(Freed(2));
  EXPECT_TRUE(shm::Unpin(session_.word(1), young));
  epochs_.Collect();
  EXPECT_TRUE(Freed(2));
  EXPECT_EQ(attention_, 1);  // something was waiting all the time
}

TEST_F(EpochsTest, AnOverduePinIsRevokedAndBlocksNoLonger) {
  epochs_.AddSource(session_.source);
  const std::uint64_t pin = shm::Pin(session_.word(0), epoch_);
  Retire(1);
  clock_.Advance(kPinLimit - Clock::Duration(1));
  EXPECT_NE(epochs_.Collect(), std::nullopt);
  EXPECT_FALSE(Freed(1));
  EXPECT_EQ(session_.word(0).load(), pin);
  clock_.Advance(Clock::Duration(1));
  EXPECT_EQ(epochs_.Collect(), std::nullopt);
  EXPECT_TRUE(Freed(1));
  EXPECT_EQ(epochs_.revoked(), 1u);
  EXPECT_FALSE(shm::Unpin(session_.word(0), pin));
}

TEST_F(EpochsTest, OnlyTheOverdueReaderIsRevoked) {
  epochs_.AddSource(session_.source);
  const std::uint64_t old = shm::Pin(session_.word(0), epoch_);
  Retire(1);
  clock_.Advance(kPinLimit / 2);
  const std::uint64_t young = shm::Pin(session_.word(1), epoch_);
  Retire(2);
  clock_.Advance(kPinLimit / 2);
  epochs_.Collect();
  EXPECT_TRUE(Freed(1));
  EXPECT_FALSE(Freed(2));
  EXPECT_FALSE(shm::Unpin(session_.word(0), old));
  EXPECT_TRUE(shm::Unpin(session_.word(1), young));
}

// Of two sessions, the one that asked for it may read longer, and only memory that it read waits.
TEST_F(EpochsTest, ASourceMayHaveALimitOfItsOwn) {
  for (const Clock::Duration limit : {kPinLimit / 5, kPinLimit * 20}) {
    Session patient;
    patient.source->limit = limit;
    epochs_.AddSource(session_.source);
    epochs_.AddSource(patient.source);
    const std::uint64_t usual = shm::Pin(session_.word(0), epoch_);
    const std::uint64_t own = shm::Pin(patient.word(0), epoch_);
    const std::uint64_t revoked = epochs_.revoked();
    freed_.clear();
    Retire(1);
    const Clock::Duration first = std::min(limit, kPinLimit);
    clock_.Advance(first - Clock::Duration(1));
    epochs_.Collect();
    EXPECT_EQ(epochs_.revoked(), revoked);
    clock_.Advance(Clock::Duration(1));
    EXPECT_NE(epochs_.Collect(), std::nullopt);
    EXPECT_EQ(epochs_.revoked(), revoked + 1);
    EXPECT_EQ(patient.word(0).load() == own, limit > kPinLimit);
    EXPECT_EQ(session_.word(0).load() == usual, limit < kPinLimit);
    EXPECT_FALSE(Freed(1)) << "the other one still reads";
    clock_.Advance(std::max(limit, kPinLimit) - first);
    EXPECT_EQ(epochs_.Collect(), std::nullopt);
    EXPECT_TRUE(Freed(1));
    EXPECT_EQ(epochs_.revoked(), revoked + 2);
    epochs_.RemoveSource(session_.source.get());
    epochs_.RemoveSource(patient.source.get());
    session_.word(0).store(shm::kPinFree);
  }
}

TEST_F(EpochsTest, TheDaemonsOwnReadersAreNeverRevoked) {
  session_.source->revocable = false;
  epochs_.AddSource(session_.source);
  const std::uint64_t pin = shm::Pin(session_.word(0), epoch_);
  Retire(1);
  clock_.Advance(100 * kPinLimit);
  EXPECT_NE(epochs_.Collect(), std::nullopt);
  EXPECT_FALSE(Freed(1));
  EXPECT_TRUE(shm::Unpin(session_.word(0), pin));
  epochs_.Collect();
  EXPECT_TRUE(Freed(1));
}

TEST_F(EpochsTest, ASourceThatGoesTakesItsPinsAlong) {
  epochs_.AddSource(session_.source);
  epochs_.AddSource(other_.source);
  shm::Pin(session_.word(0), epoch_);
  const std::uint64_t pin = shm::Pin(other_.word(0), epoch_);
  Retire(1);
  epochs_.RemoveSource(session_.source.get());
  EXPECT_FALSE(Freed(1));
  EXPECT_TRUE(shm::Unpin(other_.word(0), pin));
  epochs_.Collect();
  EXPECT_TRUE(Freed(1));
  shm::Pin(session_.word(1), epoch_);  // the slots of an ended session are ignored
  Retire(2);
  EXPECT_TRUE(Freed(2));
  shm::Pin(other_.word(0), epoch_);
  Retire(3);
  epochs_.RemoveSource(other_.source.get());  // frees by itself
  EXPECT_TRUE(Freed(3));
}

TEST_F(EpochsTest, ASourceOutlivesTheBatchesThatWaitForIt) {
  auto slots = std::make_unique<std::array<shm::ReaderSlot, kSlots>>();
  auto source = std::make_shared<PinSource>(PinSource{slots->data(), kSlots});
  std::weak_ptr<PinSource> weak = source;
  epochs_.AddSource(source);
  const std::uint64_t pin = shm::Pin((*slots)[0].word, epoch_);
  Retire(1);
  source.reset();
  EXPECT_FALSE(weak.expired());
  EXPECT_TRUE(shm::Unpin((*slots)[0].word, pin));
  epochs_.Collect();
  epochs_.RemoveSource(weak.lock().get());
  EXPECT_TRUE(weak.expired());
}

TEST_F(EpochsTest, GarbageMayRetireMoreGarbage) {
  epochs_.AddSource(session_.source);
  const std::uint64_t pin = shm::Pin(session_.word(0), epoch_);
  epochs_.Retire([this] { Retire(2); }, 1);
  EXPECT_TRUE(shm::Unpin(session_.word(0), pin));
  epochs_.Collect();  // deadlocks if garbage is destroyed under the lock
  EXPECT_TRUE(Freed(2));
}

TEST_F(EpochsTest, WhatWaitsAtTheEndIsFreedThen) {
  {
    Epochs epochs({.epoch = &epoch_, .clock = &clock_, .pin_limit = kPinLimit});
    epochs.AddSource(session_.source);
    shm::Pin(session_.word(0), epoch_);
    epochs.Retire([this] { freed_.push_back(1); }, 1);
    EXPECT_FALSE(Freed(1));
  }
  EXPECT_TRUE(Freed(1));
}

TEST_F(EpochsTest, CountsWhoIsPinned) {
  EXPECT_EQ(Epochs::Pinned(*session_.source), 0u);
  const std::uint64_t pin = shm::Pin(session_.word(2), epoch_);
  session_.word(3).store(shm::kPinRevoked);
  EXPECT_EQ(Epochs::Pinned(*session_.source), 1u);
  EXPECT_TRUE(shm::Unpin(session_.word(2), pin));
  EXPECT_EQ(Epochs::Pinned(*session_.source), 0u);
}

// Whatever a worker writes into its slots, retired memory never waits longer than the limit, and
// another session's reader is never revoked early.
TEST_F(EpochsTest, HostileWordsDelayAtMostThePinLimit) {
  TestRandom random;
  epochs_.AddSource(session_.source);
  epochs_.AddSource(other_.source);
  std::vector<std::pair<int, Clock::TimePoint>> retired;
  std::uint64_t honest = 0;
  Clock::TimePoint pinned_at{};
  std::vector<std::uint64_t> seen = {0, 1, 2, 3};
  for (int step = 0; step < 20000; ++step) {
    switch (random.Below(6)) {
      case 0:
      case 1: {  // any word: limits, past and future epochs, earlier words
        shm::Word& word = session_.word(static_cast<std::uint32_t>(random.Below(kSlots)));
        seen.push_back(word.load());
        if (seen.size() > 64) seen.erase(seen.begin());
        const std::uint64_t choices[] = {random.Border(), random.Pick(seen),
                                         shm::PinWord(epoch_.load() - random.Below(3)),
                                         shm::PinWord(random.Below(10)), shm::kPinRevoked};
        word.store(random.Pick(choices));
        break;
      }
      case 2:
        Retire(step);
        retired.emplace_back(step, clock_.Now());
        break;
      case 3:
        if (honest != 0) {
          const bool held = shm::Unpin(other_.word(0), honest);
          ASSERT_TRUE(held || clock_.Now() - pinned_at >= kPinLimit);
          honest = 0;
        } else {
          honest = shm::Pin(other_.word(0), epoch_);
          pinned_at = clock_.Now();
        }
        break;
      case 4:
        clock_.Advance(Clock::Duration(random.Below(2'000'000'000)));
        break;
      default:
        epochs_.Collect();
        std::set<int> freed(freed_.begin(), freed_.end());
        for (const auto& [marker, when] : retired) {
          ASSERT_TRUE(freed.contains(marker) || clock_.Now() - when < kPinLimit) << marker;
        }
        std::erase_if(retired, [&](const auto& entry) { return freed.contains(entry.first); });
        freed_.clear();
    }
  }
  // The pin stress checks that honest readers keep what they see, even with hostile neighbours.
  clock_.Advance(kPinLimit);
  EXPECT_EQ(epochs_.Collect(), std::nullopt);
  EXPECT_EQ(epochs_.waiting_bytes(), 0u);
}

TEST_F(EpochsTest, RetiringCollectingAndSourcesFromManyThreads) {
  const std::uint64_t seed = TestSeed();
  std::atomic<std::uint64_t> retired{0}, destroyed{0};
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      TestRandom random(seed + t);
      for (int round = 0; round < 100; ++round) {
        Session mine;
        epochs_.AddSource(mine.source);
        for (int step = 0; step < 50; ++step) {
          const auto slot = static_cast<std::uint32_t>(random.Below(kSlots));
          const std::uint64_t pin = shm::Pin(mine.word(slot), epoch_);
          retired.fetch_add(1);
          epochs_.Retire([&] { destroyed.fetch_add(1); }, 1);
          if (random.OneIn(4)) epochs_.Collect();
          if (!random.OneIn(5)) (void)shm::Unpin(mine.word(slot), pin);
        }
        epochs_.RemoveSource(mine.source.get());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(epochs_.Collect(), std::nullopt);
  EXPECT_EQ(destroyed.load(), retired.load());
  EXPECT_EQ(epochs_.waiting_bytes(), 0u);
}

}  // namespace
}  // namespace tessera::pool
