// A part of an account that others cannot take.
#include "daemon/pool/guarantees.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <thread>
#include <vector>

#include "tests/fakes/seed.h"

namespace tessera::pool {
namespace {

class GuaranteesTest : public testing::Test {
 protected:
  static constexpr MemoryTag kTag = MemoryTag::kTiles;
  absl::StatusOr<Charge> Take(int tenant, std::uint64_t bytes) {
    return parts_[tenant].Reserve(kTag, bytes);
  }

  Account node_{"node", 100, nullptr, ErrorCause::kPoolFull};
  Guarantees guarantees_{&node_};
  Account parts_[3] = {{"a", &guarantees_, 0}, {"b", &guarantees_, 1}, {"c", &guarantees_, 2}};
};

TEST_F(GuaranteesTest, WithoutAnyTheFirstTakesAll) { EXPECT_TRUE(Take(0, 100).ok()); }

TEST_F(GuaranteesTest, UnusedPartsOfOthersStayFree) {
  for (int i = 0; i < 3; ++i) guarantees_.Set(i, 20);
  const auto own = Take(0, 60);
  ASSERT_TRUE(own.ok());
  const absl::Status more = Take(0, 1).status();
  EXPECT_EQ(more.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(more.ToString(),
              testing::HasSubstr("node: 1 B requested for tiles, 60 B used of a limit of 100 B, of "
                                 "which 40 B are reserved for other tenants"));
  const std::optional<Shortage> shortage = ShortageOf(more);
  ASSERT_TRUE(shortage.has_value());
  EXPECT_EQ(shortage->account, "node");
  EXPECT_EQ(shortage->limit, 60u);
  const auto second = Take(1, 20);
  EXPECT_TRUE(second.ok());
  EXPECT_FALSE(Take(1, 1).ok()) << "the rest is of c";
  const auto third = Take(2, 20);
  EXPECT_TRUE(third.ok());
  EXPECT_EQ(node_.used_bytes(), 100u);
}

TEST_F(GuaranteesTest, ARequestThatExceedsItsOwnPartCountsAllOfOthers) {
  guarantees_.Set(0, 20);
  guarantees_.Set(1, 50);
  EXPECT_FALSE(Take(0, 51).ok());
  EXPECT_TRUE(Take(0, 50).ok());
}

TEST_F(GuaranteesTest, WhatIsReturnedIsReservedAgain) {
  guarantees_.Set(0, 30);
  { ASSERT_TRUE(Take(0, 30).ok()); }
  EXPECT_FALSE(Take(1, 71).ok());
  auto lent = Take(1, 70);
  ASSERT_TRUE(lent.ok());
  lent->ShrinkTo(10);
  EXPECT_TRUE(Take(2, 60).ok());
}

TEST_F(GuaranteesTest, APartThatIsReservedLaterTakesNothingBack) {
  const auto all = Take(0, 90);
  guarantees_.Set(1, 30);
  EXPECT_FALSE(Take(0, 1).ok());
  EXPECT_TRUE(Take(1, 10).ok());
  EXPECT_FALSE(Take(1, 11).ok());
}

TEST_F(GuaranteesTest, ThreadsLeaveEveryPart) {
  for (int i = 0; i < 3; ++i) guarantees_.Set(i, 25);
  const std::uint64_t seed = TestSeed();
  std::atomic<int> refused{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      TestRandom random(seed + t);
      for (int i = 0; i < 20000; ++i) {
        // The last tenant stays within its part and is never refused.
        const bool modest = t == 2;
        if (!Take(t, random.Between(1, modest ? 25 : 60)).ok() && modest) refused.fetch_add(1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(refused.load(), 0);
  EXPECT_EQ(node_.used_bytes(), 0u);
}

}  // namespace
}  // namespace tessera::pool
