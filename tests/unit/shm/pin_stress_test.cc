// Readers on separate threads against pool::Epochs, which poisons freed memory. The protocol
// promises that a reader whose Unpin succeeded has never seen poison.

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "daemon/pool/epochs.h"
#include "gtest/gtest.h"
#include "proto/shm/pin.h"
#include "tests/fakes/fake_clock.h"
#include "tests/fakes/seed.h"

namespace tessera::shm {
namespace {

constexpr std::uint64_t kPoison = 0xdeadbeefdeadbeef;
constexpr std::uint32_t kReaders = 3;
constexpr std::uint32_t kWords = 16;
constexpr std::uint64_t kObjects = 32;
constexpr std::uint64_t kPinsOfEachReader = 1000;
constexpr std::uint64_t kPublications = 5000;

// Objects of plain memory, without revocation, so that ThreadSanitizer proves the order of every
// access; and objects of atomics for revoked readers, which may read memory while it is
// overwritten.
struct PlainObject {
  std::array<std::uint64_t, kWords> words{};
  std::uint64_t Load(std::uint32_t i) const { return words[i]; }
  void Fill(std::uint64_t value) { words.fill(value); }
};
struct RacyObject {
  std::array<std::atomic<std::uint64_t>, kWords> words{};
  std::uint64_t Load(std::uint32_t i) const { return words[i].load(std::memory_order_relaxed); }
  void Fill(std::uint64_t value) {
    for (auto& word : words) word.store(value, std::memory_order_relaxed);
  }
};

// Publishes one object at a time, like a lane word that refers to a snapshot.
template <typename Object>
class World {
 public:
  explicit World(Clock::Duration pin_limit)
      : epochs_({.epoch = &epoch_, .clock = &clock_, .pin_limit = pin_limit}) {
    source_ = std::make_shared<pool::PinSource>(pool::PinSource{slots_.data(), kReaders});
    epochs_.AddSource(source_);
    for (std::uint64_t i = 0; i < kObjects; ++i) {
      objects_[i].Fill(kPoison);
      free_.push_back(i);
    }
    Publish(1);
  }

  void Publish(std::uint64_t value) {
    for (epochs_.Collect(); free_.empty(); epochs_.Collect()) std::this_thread::yield();
    const std::uint64_t index = free_.back();
    free_.pop_back();
    objects_[index].Fill(value);
    const std::uint64_t old = published_.exchange(index + 1, std::memory_order_seq_cst);
    if (old == 0) return;
    epochs_.Retire(
        [this, old] {
          objects_[old - 1].Fill(kPoison);
          free_.push_back(old - 1);
        },
        sizeof(Object));
  }

  struct Tally {
    std::uint64_t held = 0;
    std::uint64_t revoked = 0;
    std::uint64_t poison_under_pin = 0;
    std::uint64_t torn_under_pin = 0;
  };

  Tally Read(std::uint32_t reader, const std::atomic<bool>& stop) {
    Tally tally;
    while (!stop.load(std::memory_order_relaxed)) {
      const std::uint64_t pin = Pin(slots_[reader].word, epoch_);
      const std::uint64_t index = published_.load(std::memory_order_seq_cst) - 1;
      // Usually stays until the object has been replaced, because the interesting moment comes
      // afterwards.
      for (int spin = 0; spin < 300 && published_.load(std::memory_order_relaxed) == index + 1;) {
        ++spin;
      }
      const std::uint64_t first = objects_[index].Load(0);
      bool poison = first == kPoison;
      bool torn = false;
      for (std::uint32_t i = 1; i < kWords; ++i) {
        const std::uint64_t word = objects_[index].Load(i);
        poison = poison || word == kPoison;
        torn = torn || word != first;
      }
      const bool held = Unpin(slots_[reader].word, pin);
      std::this_thread::yield();  // for machines with fewer cores than threads
      if (!held) {
        ++tally.revoked;
        continue;
      }
      ++tally.held;
      if (tally.held == kPinsOfEachReader) satisfied_.fetch_add(1, std::memory_order_relaxed);
      tally.poison_under_pin += poison;
      tally.torn_under_pin += torn;
    }
    return tally;
  }

  // True once every reader has held enough pins for a meaningful stress test.
  bool satisfied() const { return satisfied_.load(std::memory_order_relaxed) == kReaders; }
  const Object& published() const { return objects_[published_.load() - 1]; }
  FakeClock& clock() { return clock_; }
  pool::Epochs& epochs() { return epochs_; }
  std::size_t free_objects() const { return free_.size(); }

 private:
  FakeClock clock_;
  Word epoch_{1};
  std::array<ReaderSlot, kReaders> slots_{};
  std::atomic<std::uint64_t> published_{0};
  std::atomic<std::uint32_t> satisfied_{0};
  std::array<Object, kObjects> objects_;
  std::vector<std::uint64_t> free_;  // used by the writer only: garbage is destroyed on its thread
  std::shared_ptr<pool::PinSource> source_;
  pool::Epochs epochs_;
};

template <typename Object>
typename World<Object>::Tally Stress(World<Object>& world, const std::function<void()>& each,
                                     const std::function<bool()>& enough) {
  std::atomic<bool> stop{false};
  std::array<typename World<Object>::Tally, kReaders> tallies;
  std::vector<std::thread> readers;
  for (std::uint32_t i = 0; i < kReaders; ++i) {
    readers.emplace_back([&, i] { tallies[i] = world.Read(i, stop); });
  }
  for (std::uint64_t i = 2; i < kPublications || !world.satisfied() || !enough(); ++i) {
    world.Publish(i);
    each();
  }
  stop.store(true);
  for (std::thread& reader : readers) reader.join();
  typename World<Object>::Tally sum;
  for (const auto& tally : tallies) {
    sum.held += tally.held;
    sum.revoked += tally.revoked;
    sum.poison_under_pin += tally.poison_under_pin;
    sum.torn_under_pin += tally.torn_under_pin;
  }
  return sum;
}

TEST(PinStress, WhatAPinnedReaderSeesIsNeverFreed) {
  World<PlainObject> world(std::chrono::hours(1));
  const auto sum = Stress<PlainObject>(
      world, [&] { world.epochs().Collect(); }, [] { return true; });
  EXPECT_EQ(sum.revoked, 0u);
  EXPECT_EQ(sum.poison_under_pin, 0u);
  EXPECT_EQ(sum.torn_under_pin, 0u);
  world.epochs().Collect();
  EXPECT_EQ(world.free_objects(), kObjects - 1);
  EXPECT_EQ(world.epochs().waiting_bytes(), 0u);
}

TEST(PinStress, ARevokedReaderIsToldSoWhateverItSaw) {
  TestRandom random;
  World<RacyObject> world(std::chrono::nanoseconds(1));
  const auto sum = Stress<RacyObject>(
      world,
      [&] {
        if (random.OneIn(2)) world.clock().Advance(std::chrono::nanoseconds(2));
        world.epochs().Collect();
      },
      [&] { return world.epochs().revoked() >= 50; });
  EXPECT_EQ(sum.poison_under_pin, 0u);
  EXPECT_EQ(sum.torn_under_pin, 0u);
  // A reader whose pin is revoked before it has finished pinning pins again.
  EXPECT_LE(sum.revoked, world.epochs().revoked());
  std::printf("%llu pins held, %llu revoked\n", static_cast<unsigned long long>(sum.held),
              static_cast<unsigned long long>(sum.revoked));
}

// Checks the check: a reader without a pin does see poison, so the two tests above can fail.
TEST(PinStress, WithoutAPinPoisonIsSeen) {
  World<RacyObject> world(std::chrono::hours(1));
  const RacyObject& seen = world.published();
  EXPECT_EQ(seen.Load(0), 1u);
  world.Publish(2);
  EXPECT_EQ(seen.Load(0), kPoison);
}

}  // namespace
}  // namespace tessera::shm
