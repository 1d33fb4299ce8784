// Rate-limits log messages about events whose frequency a peer controls.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <utility>

#include "daemon/base/clock.h"
#include "daemon/base/mutex.h"

namespace tessera {

// Allows one message per interval and counts the suppressed ones. Thread-safe.
class LogRateLimit {
 public:
  // One message each `between`; after a silence, up to `burst` at once.
  explicit LogRateLimit(Clock::Duration between = std::chrono::seconds(1), int burst = 1)
      : between_(between), burst_(burst) {}

  // Returns the number of messages suppressed since the last one if a message is allowed now, else
  // nullopt.
  std::optional<std::uint64_t> Say(Clock::TimePoint now) {
    MutexLock lock(mutex_);
    // What is said now counts from here: `burst_` messages back at most.
    const Clock::TimePoint earliest = now - burst_ * between_;
    const Clock::TimePoint from = said_.has_value() ? std::max(*said_, earliest) : earliest;
    if (from + between_ > now) {
      ++pending_logs_;
      return std::nullopt;
    }
    said_ = from + between_;
    return std::exchange(pending_logs_, 0);
  }

 private:
  const Clock::Duration between_;
  const int burst_;
  Mutex mutex_;
  std::optional<Clock::TimePoint> said_ TESSERA_GUARDED_BY(mutex_);
  std::uint64_t pending_logs_ TESSERA_GUARDED_BY(mutex_) = 0;
};

}  // namespace tessera
