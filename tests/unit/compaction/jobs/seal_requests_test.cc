#include "daemon/compaction/lanes/seal_requests.h"

#include <optional>
#include <vector>

#include "gtest/gtest.h"
#include "tests/fakes/seed.h"

namespace tessera::compaction {
namespace {

// Whether a job that carries out `by` has done what `wish` asks for.
bool Covers(const std::optional<SealRequest>& by, const SealRequest& wish) {
  return by.has_value() && by->all_before >= wish.all_before &&
         by->decoded_before >= wish.decoded_before;
}

TEST(SealRequests, ThoseThatWaitAreOneJob) {
  SealRequests wishes;
  EXPECT_TRUE(wishes.Want({.all_before = 7}));
  EXPECT_FALSE(wishes.Want({.all_before = 5, .decoded_before = 9}));
  EXPECT_TRUE(wishes.Begin(0));
  EXPECT_EQ(wishes.running(), (SealRequest{.all_before = 7, .decoded_before = 9}));
  EXPECT_FALSE(wishes.wanted());
  EXPECT_FALSE(wishes.Begin(0)) << "another job has taken it on";
  EXPECT_TRUE(wishes.Want({})) << "since it began";
}

// A caller that waits for a seal gets its result, even if another job has merged the request into
// its own.
TEST(SealRequests, AJobDoesWhatItWasTold) {
  SealRequests wishes;
  wishes.Want({.all_before = 7});
  EXPECT_TRUE(wishes.Begin(0));
  EXPECT_TRUE(wishes.Begin(wishes.Tell({.all_before = 7})));
  wishes.End();
  EXPECT_EQ(wishes.running(), SealRequest{.all_before = 7}) << "the other one has not ended";
  wishes.End();
  EXPECT_EQ(wishes.running(), SealRequest());
}

// In its state by then, cut or not.
TEST(SealRequests, WhatGoesOnIsWantedAgain) {
  SealRequests wishes;
  wishes.Want({.all_before = 7});
  EXPECT_TRUE(wishes.Begin(0));
  wishes.CutTo(5);
  wishes.RequeueRunning();
  wishes.End();
  EXPECT_TRUE(wishes.Begin(0));
  EXPECT_EQ(wishes.running(), SealRequest{.all_before = 5});
}

// Wherever the request is.
TEST(SealRequests, OneThatWasCutEndsThere) {
  SealRequests wishes;
  wishes.Want({.all_before = 7, .decoded_before = 9});
  wishes.CutTo(8);
  EXPECT_TRUE(wishes.Begin(0));
  EXPECT_EQ(wishes.running(), (SealRequest{.all_before = 7, .decoded_before = 8}));
  wishes.CutTo(5);
  EXPECT_EQ(wishes.running(), (SealRequest{.all_before = 5, .decoded_before = 5}));
  wishes.Stall();
  wishes.End();
  wishes.CutTo(3);
  EXPECT_EQ(wishes.Ahead(), (SealRequest{.all_before = 3, .decoded_before = 3}));
  EXPECT_TRUE(wishes.stalled());
  EXPECT_TRUE(wishes.RequeueDeferred());
  EXPECT_FALSE(wishes.stalled());
  EXPECT_FALSE(wishes.RequeueDeferred());
}

// Whatever jobs do, a fork inherits all requests that are not carried out.
TEST(SealRequests, NoneIsLostFromSight) {
  TestRandom random;
  for (int round = 0; round < 200; ++round) {
    SealRequests wishes;
    int jobs = 0;
    std::vector<SealRequest> open;  // requests that no job has carried out
    for (int step = 0; step < 40; ++step) {
      switch (random.Below(6)) {
        case 0:
        case 1: {
          const SealRequest wish = {.all_before = random.Below(100),
                                    .decoded_before = random.Below(100)};
          const bool first = !wishes.wanted();
          EXPECT_EQ(wishes.Want(wish), first);
          open.push_back(wish);
          break;
        }
        case 2:
          if (!wishes.Begin(0)) break;
          ++jobs;
          if (random.OneIn(2)) wishes.AdoptDeferred();
          break;
        case 3:
        case 4:
          if (jobs == 0) break;
          if (random.OneIn(2)) {
            wishes.Stall();
          } else {
            const SealRequest done = wishes.running();
            std::erase_if(open, [&](const SealRequest& wish) { return Covers(done, wish); });
          }
          wishes.End();
          --jobs;
          break;
        default: {
          const bool stalled = wishes.stalled();
          EXPECT_EQ(wishes.RequeueDeferred(), stalled);
          EXPECT_FALSE(wishes.stalled());
        }
      }
      for (const SealRequest& wish : open) {
        ASSERT_TRUE(Covers(wishes.Ahead(), wish)) << "round " << round << ", step " << step;
      }
    }
  }
}

}  // namespace
}  // namespace tessera::compaction
