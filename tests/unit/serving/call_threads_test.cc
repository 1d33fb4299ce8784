#include "daemon/serving/call/call_threads.h"

#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <memory>
#include <thread>

namespace tessera::serving {
namespace {

TEST(CallThreads, WorkThatWaitsDoesNotHoldUpOtherWork) {
  CallThreads threads({.most = 8});
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
    CallThreads threads({.most = 2});
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
  CallThreads threads({.most = 64});
  for (int i = 0; i < 200; ++i) {
    auto done = std::make_shared<std::latch>(1);
    threads.Run([done] { done->count_down(); });
    done->wait();
  }
  EXPECT_LE(threads.threads(), 3u);  // one may not be idle yet when the next work comes
}

// The thread that calls Run stands for one of gRPC's.
TEST(CallThreads, TheCallersThreadWorksWhileAnotherIsLeft) {
  CallThreads threads({.most = 4, .most_of_grpc = 1});
  const std::thread::id caller = std::this_thread::get_id();
  std::thread::id first;
  std::thread::id second;
  std::latch done(1);
  threads.Run([&] {
    first = std::this_thread::get_id();
    threads.Run([&] {  // arrives on another thread of gRPC
      second = std::this_thread::get_id();
      done.count_down();
    });
    done.wait();
  });
  EXPECT_EQ(first, caller);
  EXPECT_NE(second, caller);
}

TEST(CallThreads, TheEndWaitsForCallersThreads) {
  auto threads = std::make_unique<CallThreads>(CallThreads::Options{.most_of_grpc = 1});
  std::latch began(1);
  std::latch release(1);
  std::atomic<bool> over{false};
  std::thread caller([&] {
    threads->Run([&] {
      began.count_down();
      release.wait();
      over = true;
    });
  });
  began.wait();
  std::thread end([&] {
    threads.reset();
    EXPECT_TRUE(over);
  });
  release.count_down();
  end.join();
  caller.join();
}

}  // namespace
}  // namespace tessera::serving
