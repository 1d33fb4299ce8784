#include "daemon/lifecycle/drain_watch.h"

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <utility>

namespace tessera::lifecycle {

DrainWatch::DrainWatch(const Options& options)
    : options_(options), server_(options.server), thread_([this] { Run(); }) {}

DrainWatch::~DrainWatch() {
  over_.store(true);
  ::pthread_kill(thread_.native_handle(), kDrainRequested);
  thread_.join();
}

void DrainWatch::ForgetServer() {
  MutexLock lock(mutex_);
  server_ = nullptr;
}

void DrainWatch::Run() {
  const Clock& clock = *options_.clock;
  bool terminated = options_.first != kDrainRequested;
  Clock::TimePoint end = clock.Now() + options_.limit_of(options_.first) + kDrainPatience;
  for (;;) {
    const std::optional<int> signal = options_.signals->WaitFor(end - clock.Now());
    if (over_.load()) return;
    if (!signal.has_value()) {
      if (clock.Now() < end) continue;
      ExitNow("drain exceeded its limit: stopping at once");
    }
    if (*signal == SIGHUP) {
      options_.logger->Log(LogLevel::kInfo, "SIGHUP ignored: the daemon is draining");
      continue;
    }
    if (*signal != kDrainRequested && std::exchange(terminated, true)) {
      ExitNow("second stop signal: stopping at once");
    }
    const std::chrono::milliseconds limit = options_.limit_of(*signal);
    options_.logger->Log(LogLevel::kInfo, "already draining", {{"limit_ms", limit.count()}});
    end = std::min(end, clock.Now() + limit + kDrainPatience);
    ShortenDrain(limit);
  }
}

void DrainWatch::ShortenDrain(Clock::Duration limit) {
  MutexLock lock(mutex_);
  if (server_ != nullptr) server_->ShortenDrain(limit);
}

void DrainWatch::ExitNow(const char* why) {
  options_.logger->Log(LogLevel::kWarning, why);
  options_.logger->Flush();
  std::_Exit(0);
}

}  // namespace tessera::lifecycle
