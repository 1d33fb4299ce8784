#include "daemon/lifecycle/signals.h"

#include <chrono>

namespace tessera::lifecycle {

Signals::Signals() {
  sigemptyset(&set_);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP, kDrainRequested}) sigaddset(&set_, signal);
  pthread_sigmask(SIG_BLOCK, &set_, nullptr);
}

int Signals::Wait() const {
  int signal = 0;
  while (sigwait(&set_, &signal) != 0) {
  }
  return signal;
}

std::optional<int> Signals::WaitFor(Clock::Duration time) const {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(time);
  const timespec timeout = {.tv_sec = seconds.count(), .tv_nsec = (time - seconds).count()};
  const int signal = time < Clock::Duration::zero() ? -1 : ::sigtimedwait(&set_, nullptr, &timeout);
  return signal > 0 ? std::optional<int>(signal) : std::nullopt;
}

}  // namespace tessera::lifecycle
