#include "daemon/serving/admission.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <thread>
#include <vector>

namespace tessera::serving {
namespace {

using testing::HasSubstr;

bool Stays() { return false; }

TEST(Admission, SoManyRunSoManyWaitAndTheNextIsRefused) {
  Admission admission({.what = "attention", .running = 2, .waiting = 1});
  std::optional<Admission::Place> first(*admission.Enter(Stays));
  const Admission::Place second = *admission.Enter(Stays);
  std::atomic<bool> waits{false};
  std::atomic<bool> entered{false};
  std::thread third([&] {
    // Asked while it waits, and at no other time.
    const auto place = admission.Enter([&] {
      waits.store(true);
      return false;
    });
    EXPECT_TRUE(place.ok());
    entered.store(true);
  });
  while (!waits.load()) std::this_thread::yield();
  const absl::Status refused = admission.Enter(Stays).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(refused.ToString(), HasSubstr("2 attention requests run and 1 wait"));
  EXPECT_FALSE(entered.load());
  first.reset();
  third.join();
  EXPECT_TRUE(entered.load());
  EXPECT_TRUE(admission.Enter(Stays).ok());
}

TEST(Admission, WhoHasGoneWaitsNoLonger) {
  Admission admission({.what = "attention", .running = 1, .waiting = 4});
  std::optional<Admission::Place> only(*admission.Enter(Stays));
  const absl::Status gone = admission.Enter([] { return true; }).status();
  EXPECT_TRUE(absl::IsCancelled(gone)) << gone;
  only.reset();
  EXPECT_TRUE(admission.Enter(Stays).ok());
}

TEST(Admission, NeverMoreThanMayRun) {
  Admission admission({.what = "attention", .running = 3, .waiting = 100});
  std::atomic<int> running{0};
  std::atomic<int> most{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 12; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 50; ++round) {
        const auto place = admission.Enter(Stays);
        ASSERT_TRUE(place.ok());
        const int now = ++running;
        int seen = most.load();
        while (now > seen && !most.compare_exchange_weak(seen, now)) {
        }
        std::this_thread::yield();
        --running;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(most.load(), 3);
}

}  // namespace
}  // namespace tessera::serving
