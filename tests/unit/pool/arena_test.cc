#include "daemon/pool/arena.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <set>
#include <vector>

#include "gtest/gtest.h"
#include "tests/fakes/faulty_extents.h"
#include "tests/fakes/hostile_mapping.h"
#include "tests/fakes/seed.h"

namespace tessera::pool {
namespace {

constexpr std::uint64_t kArenaExtent = 64 * 1024;

class ArenaTest : public testing::Test {
 protected:
  Arena Make(std::uint64_t extents) {
    absl::StatusOr<Arena> arena = Arena::Create({.extent_bytes = kArenaExtent,
                                                 .limit_bytes = extents * kArenaExtent,
                                                 .node = &node_,
                                                 .tag = MemoryTag::kPoolExtents,
                                                 .source = &source_});
    EXPECT_TRUE(arena.ok()) << arena.status();
    return *std::move(arena);
  }
  Account node_{"node", 6 * kArenaExtent};
  FaultyExtents source_;
};

TEST_F(ArenaTest, ExtentsComeAtTheLowestPlaceWithANewGeneration) {
  Arena arena = Make(4);
  for (std::uint32_t i = 0; i < 3; ++i) {
    absl::StatusOr<std::uint32_t> index = arena.Grow();
    ASSERT_TRUE(index.ok()) << index.status();
    EXPECT_EQ(*index, i);
    EXPECT_EQ(arena.generation(i), 1u);
    std::memset(arena.base() + i * kArenaExtent, static_cast<int>(i) + 1, kArenaExtent);
  }
  arena.Shrink(1);
  EXPECT_EQ(arena.generation(1), 0u);
  EXPECT_EQ(arena.memory(1), nullptr);
  EXPECT_EQ(arena.extents(), 2u);
  // Still readable: readers of stale offsets never fault.
  for (std::uint64_t at = kArenaExtent; at < 2 * kArenaExtent; ++at) {
    ASSERT_EQ(arena.base()[at], std::byte{0});
  }
  EXPECT_EQ(arena.base()[kArenaExtent - 1], std::byte{1});
  EXPECT_EQ(arena.base()[2 * kArenaExtent], std::byte{3});
  ASSERT_EQ(*arena.Grow(), 1u);
  EXPECT_EQ(arena.generation(1), 2u);
  EXPECT_EQ(arena.base()[kArenaExtent], std::byte{0});  // fresh memory without the old content
}

TEST_F(ArenaTest, TheLimitAndTheNodeAndTheDeviceEachRefuse) {
  Arena arena = Make(4);
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(arena.Grow().ok());
  absl::StatusOr<std::uint32_t> full = arena.Grow();
  ASSERT_EQ(full.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(full.status().ToString().find("4 extents"), std::string::npos) << full.status();

  Arena other = Make(8);
  ASSERT_TRUE(other.Grow().ok());
  ASSERT_TRUE(other.Grow().ok());
  absl::StatusOr<std::uint32_t> node = other.Grow();
  ASSERT_EQ(node.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(node.status().ToString().find("node"), std::string::npos) << node.status();
  EXPECT_EQ(node_.used_bytes(), 6 * kArenaExtent);

  arena.Shrink(3);
  source_.Allow(0);
  EXPECT_FALSE(arena.Grow().ok());
  EXPECT_EQ(node_.used_bytes(), 5 * kArenaExtent);  // the failed one's charge was released
  EXPECT_EQ(arena.extents(), 3u);
  source_.Allow(1);
  EXPECT_EQ(*arena.Grow(), 3u);
}

TEST_F(ArenaTest, EveryExtentIsSealedAndOnlyTheDaemonWrites) {
  Arena arena = Make(3);
  for (std::uint32_t i = 0; i < 3; ++i) {
    ASSERT_TRUE(arena.Grow().ok());
    const absl::StatusOr<device::Export> share = arena.memory(i)->Share();
    ASSERT_TRUE(share.ok()) << share.status();
    EXPECT_EQ(::fcntl(share->fd.get(), F_GET_SEALS),
              F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL | F_SEAL_FUTURE_WRITE);
    const MappingReport report = TryEverything(share->fd.get(), kArenaExtent);
    for (std::size_t at = 0; at < report.size(); ++at) {
      EXPECT_EQ(report[at], kMappingAttempts[at].daemon_writes) << kMappingAttempts[at].name;
    }
    std::memset(arena.base() + i * kArenaExtent, 9, kArenaExtent);
  }
}

TEST_F(ArenaTest, WhatHasGoneIsReturnedToTheNodeAndTheKernel) {
  const int fds = CountOpenFds();
  TestRandom random;
  {
    Arena arena = Make(6);
    std::set<std::uint32_t> present;
    for (int step = 0; step < 300; ++step) {
      if (random.OneIn(2) && present.size() < 6) {
        present.insert(*arena.Grow());
      } else if (!present.empty()) {
        const std::uint32_t index =
            *std::next(present.begin(), static_cast<std::ptrdiff_t>(random.Below(present.size())));
        arena.Shrink(index);
        present.erase(index);
      }
      ASSERT_EQ(arena.extents(), present.size());
      ASSERT_EQ(node_.used_bytes(MemoryTag::kPoolExtents), present.size() * kArenaExtent);
      ASSERT_EQ(CountOpenFds(), fds + static_cast<int>(present.size()));
    }
  }
  EXPECT_EQ(node_.used_bytes(), 0u);
  EXPECT_EQ(CountOpenFds(), fds);
}

}  // namespace
}  // namespace tessera::pool
