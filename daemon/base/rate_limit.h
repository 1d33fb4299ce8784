// Rate-limits log messages about events whose frequency a peer controls.
#pragma once

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
  explicit LogRateLimit(Clock::Duration between = std::chrono::seconds(1)) : between_(between) {}

  // Returns the number of messages suppressed since the last one if a message is allowed now, else
  // nullopt.
  std::optional<std::uint64_t> Say(Clock::TimePoint now) {
    MutexLock lock(mutex_);
    if (said_.has_value() && now - *said_ < between_) {
      ++pending_logs_;
      return std::nullopt;
    }
    said_ = now;
    return std::exchange(pending_logs_, 0);
  }

 private:
  const Clock::Duration between_;
  Mutex mutex_;
  std::optional<Clock::TimePoint> said_ TESSERA_GUARDED_BY(mutex_);
  std::uint64_t pending_logs_ TESSERA_GUARDED_BY(mutex_) = 0;
};

}  // namespace tessera
