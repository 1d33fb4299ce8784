#include "client/mapped/gate.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace tessera::client {
namespace {

TEST(Gate, TurnsAwayOnceClosed) {
  Gate gate;
  {
    GateHold hold(gate, 3);
    EXPECT_TRUE(static_cast<bool>(hold));
  }
  gate.CloseAndWait();
  GateHold late(gate, 3);
  EXPECT_FALSE(static_cast<bool>(late));
  EXPECT_FALSE(gate.Enter(Gate::kSharedLane));
}

// A caller inside sees the memory. When the closer returns, no caller is inside.
TEST(Gate, ClosingWaitsForEveryoneInside) {
  for (int round = 0; round < 200; ++round) {
    Gate gate;
    std::atomic<bool> mapped{true};
    std::atomic<int> inside{0};
    std::atomic<int> faults{0};
    std::vector<std::thread> threads;
    for (std::uint32_t i = 0; i < 4; ++i) {
      threads.emplace_back([&, lane = i < 3 ? i : Gate::kSharedLane] {
        for (;;) {
          GateHold hold(gate, lane);
          if (!hold) return;
          ++inside;
          if (!mapped) ++faults;
        }
      });
    }
    while (inside < 100) std::this_thread::yield();
    gate.CloseAndWait();
    mapped = false;
    for (std::thread& thread : threads) thread.join();
    ASSERT_EQ(faults, 0);
  }
}

}  // namespace
}  // namespace tessera::client
