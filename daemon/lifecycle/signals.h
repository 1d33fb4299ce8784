// Signals: the signals that control the daemon. All threads block them; one thread takes them.
#pragma once

#include <csignal>
#include <optional>

#include "daemon/base/clock.h"

namespace tessera::lifecycle {

// SIGTERM and SIGINT drain, and a second one stops at once. SIGHUP reloads the configuration.
inline constexpr int kDrainRequested = SIGUSR1;  // raised by the Drain RPC

// Create it before any thread starts, so that all threads inherit the mask.
class Signals {
 public:
  Signals();
  int Wait() const;
  // Returns nullopt on timeout.
  std::optional<int> WaitFor(Clock::Duration time) const;

 private:
  sigset_t set_;
};

}  // namespace tessera::lifecycle
