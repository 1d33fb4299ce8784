// Heartbeats tell whether the daemon's threads still run. A watched thread beats at least every
// kHeartbeatInterval, also when it is idle; one that is silent for kHeartbeatLimit hangs.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <optional>
#include <string>
#include <utility>

#include "daemon/base/clock.h"
#include "daemon/base/mutex.h"

namespace tessera {

inline constexpr std::chrono::seconds kHeartbeatInterval{2};
inline constexpr std::chrono::seconds kHeartbeatLimit{10};

// Owned by RunDaemon; outlives the threads that beat. Thread-safe.
class Heartbeats {
 public:
  // The heartbeat of one thread, or of a group of which one thread at a time must be responsive.
  // Watched from the first Beat until End.
  class Pulse {
   public:
    Pulse(std::string name, const Clock& clock) : name_(std::move(name)), clock_(clock) {}
    void Beat() { last_.store(clock_.Now(), std::memory_order_relaxed); }
    void End() { last_.store(kUnwatched, std::memory_order_relaxed); }

   private:
    friend class Heartbeats;
    static constexpr Clock::TimePoint kUnwatched = Clock::TimePoint::max();
    const std::string name_;
    const Clock& clock_;
    std::atomic<Clock::TimePoint> last_{kUnwatched};
  };

  // `clock` outlives this object.
  explicit Heartbeats(const Clock& clock) : clock_(clock) {}
  Heartbeats(const Heartbeats&) = delete;
  Heartbeats& operator=(const Heartbeats&) = delete;

  // Adds a heartbeat. The result lives as long as this object.
  Pulse& Add(std::string name) {
    MutexLock lock(mutex_);
    return pulses_.emplace_back(std::move(name), clock_);
  }

  // Returns the name of the first added thread that hangs and its silence, as in "event loop: no
  // heartbeat for 12 s"; nullopt if all run.
  std::optional<std::string> Hung(Clock::TimePoint now) const;

 private:
  const Clock& clock_;
  mutable Mutex mutex_;
  std::deque<Pulse> pulses_ TESSERA_GUARDED_BY(mutex_);  // a deque: addresses do not change
};

}  // namespace tessera
