#pragma once

#include <atomic>
#include <cstdint>

#include "daemon/base/check.h"
#include "daemon/base/clock.h"

namespace tessera {

// A clock that moves only when the test moves it. Thread-safe. Starts at one second, so that
// earlier times can be expressed and zero means "unset".
class FakeClock final : public Clock {
 public:
  TimePoint Now() const override { return TimePoint(Duration(now_.load())); }

  void Advance(Duration by) {
    TESSERA_CHECK(by.count() >= 0, "a monotonic clock does not go back");
    now_.fetch_add(by.count());
  }

 private:
  std::atomic<std::int64_t> now_{1'000'000'000};  // nanoseconds
};

}  // namespace tessera
