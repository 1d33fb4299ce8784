#include "daemon/serving/call/admission.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace tessera::serving {
namespace {

using testing::HasSubstr;

constexpr TenantId kOne{1};
constexpr TenantId kOther{2};

bool Stays() { return false; }

TEST(Admission, SoManyRunSoManyWaitAndTheNextIsRefused) {
  Admission admission({.what = "attention", .running = 2, .waiting = 1});
  std::optional<Admission::Place> first(*admission.Enter(kOne, Stays));
  const Admission::Place second = *admission.Enter(kOne, Stays);
  std::atomic<bool> waits{false};
  std::atomic<bool> entered{false};
  std::thread third([&] {
    // Called only while it waits.
    const auto place = admission.Enter(kOne, [&] {
      waits.store(true);
      return false;
    });
    EXPECT_TRUE(place.ok());
    entered.store(true);
  });
  while (!waits.load()) std::this_thread::yield();
  const absl::Status refused = admission.Enter(kOne, Stays).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(refused.ToString(), HasSubstr("2 attention requests run and 1 wait"));
  EXPECT_FALSE(entered.load());
  first.reset();
  third.join();
  EXPECT_TRUE(entered.load());
  EXPECT_TRUE(admission.Enter(kOne, Stays).ok());
}

TEST(Admission, WhoHasGoneWaitsNoLonger) {
  Admission admission({.what = "attention", .running = 1, .waiting = 4});
  std::optional<Admission::Place> only(*admission.Enter(kOne, Stays));
  const absl::Status gone = admission.Enter(kOne, [] { return true; }).status();
  EXPECT_TRUE(absl::IsCancelled(gone)) << gone;
  only.reset();
  EXPECT_TRUE(admission.Enter(kOne, Stays).ok());
}

// However much one tenant runs and waits for, another one enters at once and has a separate queue.
TEST(Admission, ATenantWaitsForNoOther) {
  Admission admission({.what = "compression", .running = 1, .waiting = 1});
  std::optional<Admission::Place> ones(*admission.Enter(kOne, Stays));
  std::atomic<int> waiting{0};
  const auto wait = [&](TenantId tenant, std::atomic<bool>& entered) {
    return std::thread([&admission, &waiting, &entered, tenant] {
      bool asked = false;
      const auto place = admission.Enter(tenant, [&] {
        waiting.fetch_add(!std::exchange(asked, true));
        return false;
      });
      EXPECT_TRUE(place.ok());
      entered.store(true);
    });
  };
  std::atomic<bool> one_entered{false};
  std::thread one = wait(kOne, one_entered);
  while (waiting.load() < 1) std::this_thread::yield();
  EXPECT_FALSE(admission.Enter(kOne, Stays).ok()) << "its line is full";

  std::optional<Admission::Place> others(*admission.Enter(kOther, Stays));
  std::atomic<bool> other_entered{false};
  std::thread other = wait(kOther, other_entered);
  while (waiting.load() < 2) std::this_thread::yield();
  EXPECT_FALSE(admission.Enter(kOther, Stays).ok());
  // Each continues when its own tenant's place is free, although the other's is held.
  others.reset();
  other.join();
  EXPECT_TRUE(other_entered.load());
  EXPECT_FALSE(one_entered.load());
  ones.reset();
  one.join();
}

// Free places go to the tenant that runs the fewest calls.
TEST(Admission, TenantsShareThePlaces) {
  Admission admission({.what = "attention", .running = 4, .waiting = 8});
  std::vector<Admission::Place> ones;
  for (int i = 0; i < 4; ++i) ones.push_back(*admission.Enter(kOne, Stays));
  std::vector<Admission::Place> others;
  others.push_back(*admission.Enter(kOther, Stays));  // the fifth: this tenant runs none yet
  std::atomic<int> waiting{0};
  std::atomic<int> in[2]{};
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (const TenantId tenant : {kOne, kOne, kOther}) {
    threads.emplace_back([&, tenant] {
      bool asked = false;
      const auto place = admission.Enter(tenant, [&] {
        waiting.fetch_add(!std::exchange(asked, true));
        return false;
      });
      EXPECT_TRUE(place.ok());
      in[tenant == kOther].fetch_add(1);
      while (!over.load()) std::this_thread::yield();
    });
  }
  while (waiting.load() < 3) std::this_thread::yield();
  ones.pop_back();  // 4 run, the maximum
  ones.pop_back();  // 3 run: 2 of one, 1 of the other
  while (in[1].load() == 0) std::this_thread::yield();
  EXPECT_EQ(in[0].load(), 0) << "more ran of it";
  over.store(true);
  ones.clear();
  others.clear();
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(in[0].load(), 2);
}

TEST(Admission, NeverMoreThanMayRun) {
  Admission admission({.what = "attention", .running = 3, .waiting = 100});
  std::atomic<int> running{0};
  std::atomic<int> most{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 12; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 50; ++round) {
        const auto place = admission.Enter(kOne, Stays);
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
