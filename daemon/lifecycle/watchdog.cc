#include "daemon/lifecycle/watchdog.h"

#include <algorithm>
#include <utility>

namespace tessera::lifecycle {

Watchdog::Watchdog(const Options& options) : options_(options), thread_([this] { Run(); }) {}

Watchdog::~Watchdog() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  changed_.NotifyAll();
  thread_.join();
}

void Watchdog::Run() {
  Clock::Duration pause = kHeartbeatInterval;
  // Twice per interval, as the protocol advises.
  if (options_.interval.count() > 0) {
    pause = std::min<Clock::Duration>(pause, options_.interval / 2);
  }
  Clock::TimePoint next = SystemClock().Now();
  MutexLock lock(mutex_);
  while (!stopping_) {
    if (SystemClock().Now() >= next) {
      Look();
      next = SystemClock().Now() + pause;
    }
    (void)changed_.WaitUntil(mutex_, next);
  }
}

void Watchdog::Look() {
  std::optional<std::string> hung = options_.heartbeats->Hung(options_.clock->Now());
  if (hung.has_value() && !hung_.has_value()) {
    options_.logger->Log(LogLevel::kError, "a thread hangs", {{"thread", *hung}});
  }
  if (!hung.has_value() && hung_.has_value()) {
    options_.logger->Log(LogLevel::kWarning, "no thread hangs any more");
  }
  hung_ = std::move(hung);
  if (!hung_.has_value() && options_.interval.count() > 0) options_.manager->Alive();
}

}  // namespace tessera::lifecycle
