#include "client/mapped/staging.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "tests/fakes/seed.h"

namespace tessera::client {
namespace {

TEST(StagingRing, RefusesWhatNeverFits) {
  StagingRing ring(1024);
  EXPECT_TRUE(absl::IsInvalidArgument(ring.Take(0).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(ring.Take(1025).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(ring.Take(~std::uint64_t{0}).status()));
  EXPECT_TRUE(ring.Take(1024).ok());
  EXPECT_EQ(ring.taken(), 0u);
}

TEST(StagingRing, PlacesNeverOverlapWhateverTheOrderOfReturn) {
  TestRandom random;
  constexpr std::uint64_t kBytes = 4096;
  StagingRing ring(kBytes);
  std::vector<StagingRing::Place> places;
  std::uint64_t took = 0;
  for (int move = 0; move < 20000; ++move) {
    // Never waits: each takes at most 1/8, and places are released before the arena could fill.
    if (places.size() >= 4 || (!places.empty() && random.OneIn(3))) {
      const std::size_t at = random.Below(places.size());
      std::swap(places[at], places.back());
      places.pop_back();
      if (places.empty()) {
        ASSERT_EQ(ring.taken(), 0u);
      }
    }
    if (places.size() >= 4 || ring.taken() >= 7) {
      places.clear();
      continue;
    }
    absl::StatusOr<StagingRing::Place> place = ring.Take(random.Between(1, kBytes / 8));
    ASSERT_TRUE(place.ok());
    ++took;
    ASSERT_EQ(place->offset() % 64, 0u);
    ASSERT_LE(place->offset() + place->bytes(), kBytes);
    for (const StagingRing::Place& other : places) {
      ASSERT_TRUE(place->offset() + place->bytes() <= other.offset() ||
                  other.offset() + other.bytes() <= place->offset());
    }
    places.push_back(*std::move(place));
  }
  EXPECT_GT(took, 5000u);
}

TEST(StagingRing, ThreadsShareItAndClosingLetsThemGo) {
  TestRandom random;
  StagingRing ring(8192);
  std::vector<std::atomic<int>> owners(8192 / 64);
  std::atomic<int> taken{0};
  std::vector<std::thread> threads;
  for (int i = 1; i <= 4; ++i) {
    threads.emplace_back([&, i, seed = random.Bits()] {
      TestRandom own(seed);
      for (;;) {
        absl::StatusOr<StagingRing::Place> place = ring.Take(own.Between(1, 4096));
        if (!place.ok()) {
          EXPECT_TRUE(absl::IsUnavailable(place.status()));
          return;
        }
        const std::uint64_t first = place->offset() / 64;
        const std::uint64_t last = (place->offset() + place->bytes() - 1) / 64;
        for (std::uint64_t at = first; at <= last; ++at) EXPECT_EQ(owners[at].exchange(i), 0);
        for (std::uint64_t at = first; at <= last; ++at) owners[at] = 0;
        ++taken;
      }
    });
  }
  while (taken < 20000) std::this_thread::yield();
  ring.Close();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace tessera::client
