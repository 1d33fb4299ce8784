#include "daemon/pool/account.h"

#include <atomic>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/fakes/seed.h"

namespace tessera::pool {
namespace {

MemoryTag Tag(std::uint64_t i) { return static_cast<MemoryTag>(i % kMemoryTags); }

void ExpectSums(const Account& account, const std::vector<Charge>& live) {
  std::uint64_t charges = 0, tags = 0;
  for (const Charge& charge : live) charges += charge.bytes();
  for (std::size_t i = 0; i < kMemoryTags; ++i) tags += account.used_bytes(Tag(i));
  ASSERT_EQ(account.used_bytes(), charges);
  ASSERT_EQ(tags, charges);
}

TEST(Account, EveryTagHasANameOfItsOwn) {
  std::set<std::string_view> names;
  for (std::size_t i = 0; i < kMemoryTags; ++i) names.insert(TagName(Tag(i)));
  EXPECT_EQ(names.size(), kMemoryTags);
  EXPECT_FALSE(names.contains("unknown"));
}

TEST(Account, UsedIsTheSumOfLiveChargesAndOfTags) {
  TestRandom random;
  constexpr std::uint64_t kLimit = 10000;
  Account account("books", kLimit);
  std::vector<Charge> live;
  for (int step = 0; step < 5000; ++step) {
    switch (random.Below(4)) {
      case 0:
      case 1: {
        const std::uint64_t bytes = random.Below(1500);
        const std::uint64_t before = account.used_bytes();
        absl::StatusOr<Charge> charge = account.Reserve(Tag(random.Bits()), bytes);
        ASSERT_EQ(charge.ok(), before + bytes <= kLimit) << before << " + " << bytes;
        if (charge.ok()) live.push_back(*std::move(charge));
        break;
      }
      case 2:
        if (!live.empty()) {
          std::swap(random.Pick(live), live.back());
          live.pop_back();
        }
        break;
      default:
        if (live.size() >= 2) {  // a move over a live charge releases the old one
          Charge& from = random.Pick(live);
          random.Pick(live) = std::move(from);
          std::erase_if(live, [](const Charge& charge) { return charge.bytes() == 0; });
        }
    }
    ExpectSums(account, live);
  }
  live.clear();
  EXPECT_EQ(account.used_bytes(), 0u);
}

TEST(Account, ARefusalSaysWhatWasAskedWhatIsUsedAndTheLimit) {
  Account account("tenant red", 3 * 1024 * 1024);
  absl::StatusOr<Charge> held = account.Reserve(MemoryTag::kTails, 2 * 1024 * 1024);
  ASSERT_TRUE(held.ok());
  const absl::StatusOr<Charge> refused = account.Reserve(MemoryTag::kTiles, 5 * 1024 * 1024);
  ASSERT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  const std::string text = refused.status().ToString();
  for (const char* part :
       {"tenant red", "5.0 MiB requested", "tiles", "2.0 MiB used", "3.0 MiB", "free sequences"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
  }
  EXPECT_EQ(account.used_bytes(), 2u * 1024 * 1024);
  EXPECT_EQ(account.used_bytes(MemoryTag::kTiles), 0u);
}

TEST(Account, HugeRequestsNeverWrapAround) {
  Account account("small", 1000);
  absl::StatusOr<Charge> held = account.Reserve(MemoryTag::kTiles, 999);
  ASSERT_TRUE(held.ok());
  TestRandom random;
  for (int i = 0; i < 1000; ++i) {
    const std::uint64_t bytes = random.Border();
    EXPECT_EQ(account.Reserve(MemoryTag::kTiles, bytes).ok(), bytes <= 1) << bytes;
    ASSERT_EQ(account.used_bytes(), 999u);
  }
}

TEST(Account, ASmallerLimitRefusesUntilEnoughIsReturned) {
  Account account("a", 1000);
  absl::StatusOr<Charge> held = account.Reserve(MemoryTag::kTiles, 800);
  ASSERT_TRUE(held.ok());
  account.SetLimit(500);
  EXPECT_EQ(account.used_bytes(), 800u);
  const absl::Status refused = account.Reserve(MemoryTag::kTiles, 1).status();
  EXPECT_NE(refused.ToString().find("800 B used of a limit of 500 B"), std::string::npos)
      << refused;
  held->ShrinkTo(300);
  EXPECT_TRUE(account.Reserve(MemoryTag::kTiles, 200).ok());
  EXPECT_FALSE(account.Reserve(MemoryTag::kTiles, 201).ok());
  account.SetLimit(0);
  EXPECT_TRUE(account.Reserve(MemoryTag::kTiles, 1 << 30).ok());
}

TEST(Account, WithoutALimitEverythingFits) {
  Account account("free", 0);
  EXPECT_TRUE(account.Reserve(MemoryTag::kTiles, std::uint64_t{1} << 62).ok());
  EXPECT_EQ(account.used_bytes(), 0u);
}

// A request that fits is never refused because of another one that does not. Tenants share the
// node's account, so a request that is too large must not fail the others.
TEST(Account, ARequestThatCannotFitDisturbsNobody) {
  Account account("node", 1000);
  std::atomic<bool> stop{false};
  std::atomic<int> asked{0};
  std::thread greedy([&] {
    for (; !stop.load(); asked.fetch_add(1)) {
      EXPECT_FALSE(account.Reserve(MemoryTag::kPoolExtents, 100000).ok());
    }
  });
  int refused = 0;
  for (int i = 0; i < 100000 || asked.load() < 10000; ++i) {
    refused += !account.Reserve(MemoryTag::kTails, 10).ok();
  }
  stop.store(true);
  greedy.join();
  EXPECT_EQ(refused, 0);
}

TEST(Account, ThreadsNeverExceedTheLimitAndLeaveNothing) {
  constexpr std::uint64_t kLimit = 4096;
  Account account("shared", kLimit);
  std::atomic<std::uint64_t> held{0}, over{0};
  const std::uint64_t seed = TestSeed();
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      TestRandom random(seed + t);
      for (int i = 0; i < 20000; ++i) {
        const std::uint64_t bytes = random.Between(1, 2000);
        absl::StatusOr<Charge> charge = account.Reserve(Tag(i), bytes);
        if (!charge.ok()) continue;
        if (held.fetch_add(bytes) + bytes > kLimit) over.fetch_add(1);
        const Charge moved = *std::move(charge);
        held.fetch_sub(bytes);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(over.load(), 0u);
  EXPECT_EQ(account.used_bytes(), 0u);
  for (std::size_t i = 0; i < kMemoryTags; ++i) EXPECT_EQ(account.used_bytes(Tag(i)), 0u);
}

}  // namespace
}  // namespace tessera::pool
