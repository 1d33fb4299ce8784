// Monotonic time as an injected dependency, so that tests control it (tests/fakes/fake_clock.h).
#pragma once

#include <chrono>

namespace tessera {

class Clock {
 public:
  using Duration = std::chrono::nanoseconds;
  using TimePoint = std::chrono::time_point<std::chrono::steady_clock, Duration>;

  virtual ~Clock() = default;

  // Never goes back. Thread-safe.
  virtual TimePoint Now() const = 0;
};

class SystemClock final : public Clock {
 public:
  TimePoint Now() const override { return std::chrono::steady_clock::now(); }
};

}  // namespace tessera
