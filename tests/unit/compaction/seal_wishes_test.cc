#include "daemon/compaction/seal_wishes.h"

#include <optional>
#include <vector>

#include "gtest/gtest.h"
#include "tests/fakes/seed.h"

namespace tessera::compaction {
namespace {

// Whether whoever carries out `by` has done what `wish` asks for.
bool Covers(const std::optional<SealWish>& by, const SealWish& wish) {
  return by.has_value() && by->all_before >= wish.all_before && (by->decoded || !wish.decoded);
}

TEST(SealWishes, ThoseThatWaitAreOneJob) {
  SealWishes wishes;
  EXPECT_TRUE(wishes.Want({.all_before = 7}));
  EXPECT_FALSE(wishes.Want({.all_before = 5, .decoded = true}));
  EXPECT_EQ(wishes.Begin(std::nullopt), (SealWish{.all_before = 7, .decoded = true}));
  EXPECT_FALSE(wishes.wanted());
  EXPECT_EQ(wishes.Begin(std::nullopt), std::nullopt) << "another job has taken it on";
  EXPECT_TRUE(wishes.Want({})) << "since it began";
}

// Who waits for a seal is told of one, even where another job has taken the wish on.
TEST(SealWishes, AJobDoesWhatItWasTold) {
  SealWishes wishes;
  wishes.Want({.all_before = 7});
  EXPECT_TRUE(wishes.Begin(std::nullopt).has_value());
  EXPECT_EQ(wishes.Begin(SealWish{.all_before = 7}), SealWish{.all_before = 7});
}

TEST(SealWishes, OneThatWasCutEndsThere) {
  SealWishes wishes;
  wishes.Want({.all_before = 7});
  wishes.CutTo(5);
  EXPECT_EQ(wishes.Begin(std::nullopt), SealWish{.all_before = 5});
  wishes.CutTo(3);
  EXPECT_EQ(wishes.Ahead(), SealWish{.all_before = 3}) << "of one that runs: for forks";
}

// Whatever two jobs do, a fork is told of all that has not been carried out.
TEST(SealWishes, NoneIsLostFromSight) {
  TestRandom random;
  for (int round = 0; round < 200; ++round) {
    SealWishes wishes;
    std::vector<SealWish> running;
    std::vector<SealWish> open;  // all that nobody has carried out
    for (int step = 0; step < 40; ++step) {
      switch (random.Below(6)) {
        case 0:
        case 1: {
          const SealWish wish = {.all_before = random.Below(100), .decoded = random.OneIn(2)};
          wishes.Want(wish);
          open.push_back(wish);
          break;
        }
        case 2:
          if (std::optional<SealWish> wish = wishes.Begin(std::nullopt)) {
            running.push_back(random.OneIn(2) ? wishes.WithStalled(*wish) : *wish);
          }
          break;
        case 3:
        case 4:
          if (running.empty()) break;
          if (random.OneIn(2)) {
            wishes.Stall(running.back());
          } else {
            std::erase_if(open, [&](const SealWish& wish) { return Covers(running.back(), wish); });
          }
          running.pop_back();
          wishes.End();
          break;
        default: {
          const bool stalled = wishes.stalled();
          EXPECT_EQ(wishes.WantStalled(), stalled);
          EXPECT_FALSE(wishes.stalled());
        }
      }
      for (const SealWish& wish : open) {
        ASSERT_TRUE(Covers(wishes.Ahead(), wish)) << "round " << round << ", step " << step;
      }
    }
  }
}

}  // namespace
}  // namespace tessera::compaction
