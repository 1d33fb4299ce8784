#include "daemon/base/clock.h"

#include <gtest/gtest.h>

#include <chrono>

#include "tests/fakes/fake_clock.h"

namespace tessera {
namespace {

TEST(SystemClock, NeverGoesBack) {
  const SystemClock clock;
  Clock::TimePoint last = clock.Now();
  for (int i = 0; i < 1000; ++i) {
    const Clock::TimePoint now = clock.Now();
    ASSERT_GE(now, last);
    last = now;
  }
}

TEST(FakeClock, MovesOnlyWhenTold) {
  FakeClock clock;
  const Clock::TimePoint start = clock.Now();
  EXPECT_EQ(clock.Now(), start);
  clock.Advance(std::chrono::milliseconds(250));
  EXPECT_EQ(clock.Now() - start, std::chrono::milliseconds(250));
}

}  // namespace
}  // namespace tessera
