#include "daemon/base/heartbeat.h"

#include <gtest/gtest.h>

#include "tests/fakes/fake_clock.h"

namespace tessera {
namespace {

using std::chrono::seconds;

TEST(Heartbeats, AThreadIsWatchedFromItsFirstBeat) {
  FakeClock clock;
  Heartbeats heartbeats(clock);
  EXPECT_EQ(heartbeats.Hung(clock.Now()), std::nullopt);
  Heartbeats::Pulse& pulse = heartbeats.Add("event loop");
  clock.Advance(seconds(60));
  EXPECT_EQ(heartbeats.Hung(clock.Now()), std::nullopt);
  pulse.Beat();
  clock.Advance(seconds(60));
  EXPECT_EQ(heartbeats.Hung(clock.Now()), "event loop: no heartbeat for 60 s");
}

TEST(Heartbeats, SilenceBeyondTheLimitIsAHangAndABeatEndsIt) {
  FakeClock clock;
  Heartbeats heartbeats(clock);
  Heartbeats::Pulse& first = heartbeats.Add("first");
  Heartbeats::Pulse& second = heartbeats.Add("second");
  first.Beat();
  second.Beat();
  clock.Advance(kHeartbeatLimit);
  EXPECT_EQ(heartbeats.Hung(clock.Now()), std::nullopt);
  first.Beat();
  clock.Advance(seconds(1));
  EXPECT_EQ(heartbeats.Hung(clock.Now()), "second: no heartbeat for 11 s");
  clock.Advance(seconds(10));
  EXPECT_EQ(heartbeats.Hung(clock.Now()), "first: no heartbeat for 11 s");
  first.Beat();
  second.Beat();
  EXPECT_EQ(heartbeats.Hung(clock.Now()), std::nullopt);
}

TEST(Heartbeats, AThreadThatHasEndedDoesNotHang) {
  FakeClock clock;
  Heartbeats heartbeats(clock);
  Heartbeats::Pulse& pulse = heartbeats.Add("event loop");
  pulse.Beat();
  pulse.End();
  clock.Advance(seconds(60));
  EXPECT_EQ(heartbeats.Hung(clock.Now()), std::nullopt);
}

}  // namespace
}  // namespace tessera
