// What others decide how often to bring about, and is said once in a while.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <utility>

#include "daemon/base/clock.h"
#include "daemon/base/mutex.h"

namespace tessera {

// Thread-safe.
class Seldom {
 public:
  explicit Seldom(Clock::Duration between = std::chrono::seconds(1)) : between_(between) {}

  // Where it is to be said now: how often it was not since it was last said.
  std::optional<std::uint64_t> Say(Clock::TimePoint now) {
    MutexLock lock(mutex_);
    if (said_.has_value() && now - *said_ < between_) {
      ++unsaid_;
      return std::nullopt;
    }
    said_ = now;
    return std::exchange(unsaid_, 0);
  }

 private:
  const Clock::Duration between_;
  Mutex mutex_;
  std::optional<Clock::TimePoint> said_ TESSERA_GUARDED_BY(mutex_);
  std::uint64_t unsaid_ TESSERA_GUARDED_BY(mutex_) = 0;
};

}  // namespace tessera
