// Watchdog looks for threads that hang, and tells the service manager as long as none does.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <thread>

#include "daemon/base/clock.h"
#include "daemon/base/heartbeat.h"
#include "daemon/base/log.h"
#include "daemon/base/mutex.h"
#include "daemon/platform/service_manager.h"

namespace tessera::lifecycle {

// Has a thread. A thread that hangs is logged, and no longer reported as alive, so a service
// manager with a watchdog restarts the daemon.
class Watchdog {
 public:
  struct Options {
    const Heartbeats* heartbeats;
    const ServiceManager* manager;
    Logger* logger;
    const Clock* clock;                    // that of the heartbeats
    std::chrono::microseconds interval{};  // the service manager's; 0: it has no watchdog
  };
  explicit Watchdog(const Options& options);
  ~Watchdog();

 private:
  void Run();
  void Look();

  const Options options_;
  std::optional<std::string> hung_;  // at the last look; used by the thread only
  Mutex mutex_;
  CondVar changed_;
  bool stopping_ TESSERA_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace tessera::lifecycle
