// TokenDelay spaces out the answers to wrong tokens, so that guessing is slow. The right token is
// never delayed.
#pragma once

#include <algorithm>
#include <chrono>

#include "daemon/base/clock.h"
#include "daemon/base/mutex.h"

namespace tessera::serving {

// Thread-safe.
class TokenDelay {
 public:
  static constexpr std::chrono::milliseconds kBetween{100};
  // Connections without a session are cut by then.
  static constexpr std::chrono::seconds kMost{10};

  // When a wrong token that comes now is to be answered.
  Clock::TimePoint Next(Clock::TimePoint now) {
    MutexLock lock(mutex_);
    last_ = std::min(std::max(last_, now) + kBetween, now + kMost);
    return last_;
  }

 private:
  Mutex mutex_;
  Clock::TimePoint last_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::serving
