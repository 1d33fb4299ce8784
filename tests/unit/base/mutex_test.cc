#include "daemon/base/mutex.h"

#include <gtest/gtest.h>

#include <chrono>
#include <deque>
#include <thread>
#include <vector>

namespace tessera {
namespace {

bool OtherThreadCanLock(Mutex& mutex) {
  bool locked = false;
  std::thread([&] {
    if (mutex.TryLock()) {
      locked = true;
      mutex.Unlock();
    }
  }).join();
  return locked;
}

class Counter {
 public:
  void Add() TESSERA_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    ++value_;
  }
  int value() TESSERA_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return value_;
  }

 private:
  Mutex mutex_;
  int value_ TESSERA_GUARDED_BY(mutex_) = 0;
};

TEST(Mutex, ExcludesOthers) {
  Counter counter;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&counter] {
      for (int i = 0; i < 10000; ++i) counter.Add();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(counter.value(), 40000);
}

TEST(Mutex, TryLockFailsWhileHeldElsewhere) {
  Mutex mutex;
  mutex.Lock();
  EXPECT_FALSE(OtherThreadCanLock(mutex));
  mutex.Unlock();
  EXPECT_TRUE(OtherThreadCanLock(mutex));
}

TEST(MutexLock, KnowsWhichMutexItHolds) {
  Mutex mine;
  Mutex other;
  MutexLock lock(mine);
  EXPECT_TRUE(lock.Holds(mine));
  EXPECT_FALSE(lock.Holds(other));
}

// Passes items through a bounded queue in order. A lost wake-up would hang the test, and a broken
// wait would corrupt the order.
TEST(CondVar, HandsOverInOrder) {
  struct {
    Mutex mutex;
    CondVar changed;
    std::deque<int> items TESSERA_GUARDED_BY(mutex);
  } queue;
  constexpr int kItems = 20000;
  std::thread producer([&queue] {
    for (int i = 0; i < kItems; ++i) {
      MutexLock lock(queue.mutex);
      while (queue.items.size() >= 4) queue.changed.Wait(queue.mutex);
      queue.items.push_back(i);
      queue.changed.NotifyAll();
    }
  });
  for (int i = 0; i < kItems; ++i) {
    MutexLock lock(queue.mutex);
    while (queue.items.empty()) queue.changed.Wait(queue.mutex);
    ASSERT_EQ(queue.items.front(), i);
    queue.items.pop_front();
    queue.changed.NotifyAll();
  }
  producer.join();
}

TEST(CondVar, WaitUntilGivesUpAtTheDeadlineHoldingTheLock) {
  Mutex mutex;
  CondVar never;
  const SystemClock clock;
  const Clock::TimePoint deadline = clock.Now() + std::chrono::milliseconds(5);
  mutex.Lock();
  while (never.WaitUntil(mutex, deadline)) {
  }
  EXPECT_GE(clock.Now(), deadline);
  EXPECT_FALSE(OtherThreadCanLock(mutex));
  mutex.Unlock();
  EXPECT_TRUE(OtherThreadCanLock(mutex));
}

}  // namespace
}  // namespace tessera
