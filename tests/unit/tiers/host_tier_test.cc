#include "daemon/tiers/host/host_tier.h"

#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/fakes/seed.h"

namespace tessera::tiers {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(HostTier, KeepsWhatWasPutIn) {
  HostTier tier(1 << 20);
  auto blob = tier.Reserve(1000);
  ASSERT_TRUE(blob.ok()) << blob.status();
  ASSERT_EQ(blob->bytes(), 1000u);
  std::memset(blob->data(), 7, 1000);
  Blob moved = *std::move(blob);
  EXPECT_EQ(blob->bytes(), 0u);
  EXPECT_EQ(tier.used_bytes(), 1000u);
  for (int i = 0; i < 1000; ++i) ASSERT_EQ(moved.data()[i], std::byte{7});
  moved.Reset();
  EXPECT_EQ(tier.used_bytes(), 0u);
}

TEST(HostTier, RefusesWithTheFigures) {
  HostTier tier(3 << 20);
  const auto held = tier.Reserve(2 << 20);
  ASSERT_TRUE(held.ok());
  const auto refused = tier.Reserve((1 << 20) + 1);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(refused.status().ToString(),
              AllOf(HasSubstr("1.0 MiB requested"), HasSubstr("2.0 MiB used of a limit of 3.0 MiB"),
                    HasSubstr("host_tier_bytes")));
  EXPECT_FALSE(tier.Reserve(~std::uint64_t{0}).ok());
  EXPECT_EQ(tier.used_bytes(), 2u << 20);
  EXPECT_TRUE(tier.Reserve(1 << 20).ok());
}

TEST(HostTier, TurnedOffItRefusesEverything) {
  HostTier tier(0);
  EXPECT_FALSE(tier.enabled());
  EXPECT_THAT(tier.Reserve(1).status().ToString(), HasSubstr("host_tier_bytes is 0"));
}

// The used bytes are the sum of the blobs and never exceed the limit, with many threads.
TEST(HostTier, TheSumHoldsUnderManyThreads) {
  constexpr std::uint64_t kLimit = 20'000;
  HostTier tier(kLimit);
  std::vector<std::thread> threads;
  std::atomic<int> granted{0}, refused{0}, over{0};
  TestRandom random;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, seed = random.Below(1'000'000)] {
      TestRandom mine(seed);
      std::vector<Blob> held;
      for (int i = 0; i < 2000; ++i) {
        if (held.size() > 6 || (!held.empty() && mine.OneIn(3))) held.pop_back();
        auto blob = tier.Reserve(mine.Between(1, 9000));
        over += tier.used_bytes() > kLimit;
        (blob.ok() ? granted : refused) += 1;
        if (blob.ok()) held.push_back(*std::move(blob));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(over.load(), 0);
  EXPECT_GT(granted.load(), 0);
  EXPECT_GT(refused.load(), 0);
  EXPECT_EQ(tier.used_bytes(), 0u);
}

}  // namespace
}  // namespace tessera::tiers
