// DrainWatch handles signals while the daemon drains.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/mutex.h"
#include "daemon/lifecycle/signals.h"
#include "daemon/serving/server.h"

namespace tessera::lifecycle {

// Time that a drain may take beyond its limit: running calls return, and threads end.
inline constexpr std::chrono::seconds kDrainPatience{5};

// Takes signals on its own thread. A further Drain call, or the first SIGTERM after one, can only
// shorten the limit. A second SIGTERM or SIGINT stops the process at once, and so does a drain that
// exceeds its limit by kDrainPatience. SIGHUP is ignored.
class DrainWatch {
 public:
  struct Options {
    const Signals* signals;
    int first;  // the signal that began the drain
    serving::Server* server;
    Logger* logger;
    const Clock* clock;
    std::function<std::chrono::milliseconds(int signal)> limit_of;
  };
  explicit DrainWatch(const Options& options);
  ~DrainWatch();
  // Call before the server is destroyed.
  void ForgetServer();

 private:
  void Run();
  void ShortenDrain(Clock::Duration limit);
  [[noreturn]] void ExitNow(const char* why);

  const Options options_;
  Mutex mutex_;
  serving::Server* server_ TESSERA_GUARDED_BY(mutex_);
  std::atomic<bool> over_{false};
  std::thread thread_;
};

}  // namespace tessera::lifecycle
