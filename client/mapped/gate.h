// Guards mapped memory against being unmapped while a call uses it. Every such call enters the gate
// and leaves it. Closing the gate refuses later calls and waits for those inside; then the memory
// can be unmapped.
//
// A call costs one uncontended pair of atomic additions: each reader slot has its own lane, and
// calls without a slot share one.
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

  // Returns false if the gate is closed. Never blocks.
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

  // Refuses later calls and returns when no call is inside. Must not be called from inside.
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

// Holds the gate for its lifetime if it converts to true.
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
