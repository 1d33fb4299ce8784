// Events of the C interface: a descriptor to poll, and what happened.

#include <poll.h>
#include <signal.h>

#include <atomic>
#include <string>
#include <thread>

#include "tests/e2e/c_worker.h"

namespace tessera {
namespace {

class CEvents : public CInterface {
 protected:
  bool Waits(int milliseconds) {
    pollfd one = {tessera_events_fd(worker_), POLLIN, 0};
    return ::poll(&one, 1, milliseconds) == 1;
  }
  tessera_event Next() {
    tessera_event event = TESSERA_EVENT_INIT;
    EXPECT_EQ(tessera_next_event(worker_, &event, &error_), TESSERA_OK);
    return event;
  }
};

TEST_F(CEvents, TheEndOfADaemonIsAnnouncedInOrder) {
  EXPECT_FALSE(Waits(0));
  EXPECT_EQ(Next().kind, TESSERA_EVENT_NONE);
  daemon_->Kill(SIGTERM);
  ASSERT_TRUE(Waits(10'000));
  const tessera_event draining = Next();
  EXPECT_EQ(draining.kind, TESSERA_EVENT_DRAINING);
  EXPECT_GT(draining.limit_ms, 0u);
  daemon_->Kill(SIGKILL);
  ASSERT_TRUE(Waits(10'000));
  const tessera_event lost = Next();
  EXPECT_EQ(lost.kind, TESSERA_EVENT_LEASE_LOST);
  EXPECT_NE(std::string(lost.text), "");
  EXPECT_FALSE(Waits(0));
  EXPECT_EQ(Next().kind, TESSERA_EVENT_NONE);
  // A program that knows the first fields alone.
  tessera_event small = TESSERA_EVENT_INIT;
  small.struct_size = offsetof(tessera_event, limit_ms);
  small.limit_ms = 77;
  EXPECT_EQ(tessera_next_event(worker_, &small, &error_), TESSERA_OK);
  EXPECT_EQ(small.limit_ms, 77u);
  tessera_text json = nullptr;
  EXPECT_EQ(tessera_welcome_json(worker_, &json, &error_), TESSERA_UNAVAILABLE);
}

TEST_F(CEvents, AnExecutorRunsEveryTaskOnce) {
  tessera_executor* team = nullptr;
  ASSERT_EQ(tessera_executor_create(3, &team, &error_), TESSERA_OK);
  const auto run_many = [&] {
    for (std::uint32_t round = 0; round < 300; ++round) {
      std::vector<std::atomic<int>> done(1 + round % 17);
      tessera_executor_run(
          team, static_cast<std::uint32_t>(done.size()),
          [](void* context, std::uint32_t i) {
            ++(*static_cast<std::vector<std::atomic<int>>*>(context))[i];
          },
          &done);
      for (const auto& times : done) ASSERT_EQ(times, 1);
    }
  };
  std::thread other(run_many);
  run_many();
  other.join();
  tessera_executor_destroy(team);
}

}  // namespace
}  // namespace tessera
