#include "daemon/serving/call/call_threads.h"

#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <memory>

namespace tessera::serving {
namespace {

TEST(CallThreads, WorkThatWaitsDoesNotHoldUpOtherWork) {
  CallThreads threads(8);
  std::latch together(8);
  std::latch done(8);
  for (int i = 0; i < 8; ++i) {
    threads.Run([&] {
      together.arrive_and_wait();
      done.count_down();
    });
  }
  done.wait();
  EXPECT_EQ(threads.threads(), 8u);
}

TEST(CallThreads, BeyondTheLimitWorkWaitsForAThread) {
  std::atomic<int> ran{0};
  {
    CallThreads threads(2);
    std::latch release(1);
    for (int i = 0; i < 100; ++i) {
      threads.Run([&] {
        release.wait();
        ++ran;
      });
    }
    EXPECT_LE(threads.threads(), 2u);
    release.count_down();
  }
  EXPECT_EQ(ran.load(), 100) << "the end waits for all of it";
}

TEST(CallThreads, IdleThreadsAreUsedAgain) {
  CallThreads threads(64);
  for (int i = 0; i < 200; ++i) {
    auto done = std::make_shared<std::latch>(1);
    threads.Run([done] { done->count_down(); });
    done->wait();
  }
  EXPECT_LE(threads.threads(), 3u);  // one may not be idle yet when the next work comes
}

}  // namespace
}  // namespace tessera::serving
