#include "daemon/serving/http/pages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "tests/fakes/fake_clock.h"

namespace tessera::serving {
namespace {

using std::chrono::seconds;

class StatusPagesTest : public ::testing::Test {
 protected:
  http::Response Get(const std::string& path) const {
    const std::vector<http::Page> pages = StatusPages(services_);
    return std::ranges::find(pages, path, &http::Page::path)->answer();
  }

  FakeClock clock_;
  Heartbeats heartbeats_{clock_};
  Services services_{.clock = &clock_, .heartbeats = &heartbeats_};
};

TEST_F(StatusPagesTest, HealthNamesTheThreadThatHangs) {
  Heartbeats::Pulse& loop = heartbeats_.Add("event loop");
  Heartbeats::Pulse& jobs = heartbeats_.Add("background jobs");
  EXPECT_EQ(Get("/healthz").status, 200);
  loop.Beat();
  jobs.Beat();
  clock_.Advance(seconds(9));
  loop.Beat();
  EXPECT_EQ(Get("/healthz").body, "ok\n");
  clock_.Advance(seconds(3));
  EXPECT_EQ(Get("/healthz").status, 503);
  EXPECT_EQ(Get("/healthz").body, "background jobs: no heartbeat for 12 s\n");
  jobs.Beat();
  EXPECT_EQ(Get("/healthz").status, 200);
}

TEST_F(StatusPagesTest, ReadinessSaysWhyNot) {
  EXPECT_EQ(Get("/readyz").status, 503);
  EXPECT_EQ(Get("/readyz").body, "the daemon is starting\n");
  services_.serving.store(true);
  services_.draining.store(true);
  EXPECT_EQ(Get("/readyz").status, 503);
  EXPECT_EQ(Get("/readyz").body, "the daemon is draining and accepts no new sessions\n");
}

}  // namespace
}  // namespace tessera::serving
