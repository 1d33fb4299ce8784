#include "daemon/base/heartbeat.h"

#include "daemon/base/strings.h"

namespace tessera {

std::optional<std::string> Heartbeats::Hung(Clock::TimePoint now) const {
  MutexLock lock(mutex_);
  for (const Pulse& pulse : pulses_) {
    const Clock::TimePoint last = pulse.last_.load(std::memory_order_relaxed);
    if (last == Pulse::kUnwatched || now - last <= kHeartbeatLimit) continue;
    const auto silence = std::chrono::duration_cast<std::chrono::seconds>(now - last);
    return Concat(pulse.name_, ": no heartbeat for ", silence.count(), " s");
  }
  return std::nullopt;
}

}  // namespace tessera
