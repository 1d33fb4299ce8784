// Who may touch mapped memory, and until when. Every call that does enters the gate and leaves it;
// closing the gate turns away later calls, waits for those inside, and then the memory can go.
//
// A call costs one uncontended pair of atomic additions: each reader slot has a lane of its own,
// and calls without a slot share one.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "daemon/base/mutex.h"
#include "proto/shm/layout.h"

namespace tessera::client {

class Gate {
 public:
  static constexpr std::uint32_t kSharedLane = shm::kReaderSlots;

  // False: closed. Never blocks.
  bool Enter(std::uint32_t lane) {
    lanes_[lane].inside.fetch_add(1, std::memory_order_seq_cst);
    if (!closed_.load(std::memory_order_seq_cst)) [[likely]]
      return true;
    Leave(lane);
    return false;
  }
  void Leave(std::uint32_t lane) {
    lanes_[lane].inside.fetch_sub(1, std::memory_order_seq_cst);
    if (closed_.load(std::memory_order_seq_cst)) [[unlikely]]
      WakeCloser();
  }

  // Turns away whoever comes from now on, and returns when nobody is inside. Not from inside.
  void CloseAndWait() {
    closed_.store(true, std::memory_order_seq_cst);
    MutexLock lock(mutex_);
    while (!Empty()) left_.Wait(mutex_);
  }

 private:
  struct alignas(64) Lane {
    std::atomic<std::uint32_t> inside{0};
  };

  bool Empty() const {
    for (const Lane& lane : lanes_) {
      if (lane.inside.load(std::memory_order_seq_cst) != 0) return false;
    }
    return true;
  }
  void WakeCloser() {
    MutexLock lock(mutex_);
    left_.NotifyAll();
  }

  std::atomic<bool> closed_{false};
  Mutex mutex_;
  CondVar left_;
  std::array<Lane, shm::kReaderSlots + 1> lanes_;
};

// Inside the gate for as long as it lives, where it is true.
class GateHold {
 public:
  GateHold(Gate& gate, std::uint32_t lane) : gate_(gate), lane_(lane), held_(gate.Enter(lane)) {}
  ~GateHold() {
    if (held_) gate_.Leave(lane_);
  }
  GateHold(const GateHold&) = delete;
  GateHold& operator=(const GateHold&) = delete;
  explicit operator bool() const { return held_; }

 private:
  Gate& gate_;
  const std::uint32_t lane_;
  const bool held_;
};

}  // namespace tessera::client
