// A daemon without gRPC's sockets and without its configuration, on a clock and a scheduler that
// the test supplies.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "daemon/base/log.h"
#include "daemon/cache/tenant/node.h"
#include "daemon/compaction/jobs/compactor.h"
#include "daemon/compaction/jobs/tail_absorber.h"
#include "daemon/residency/pressure.h"
#include "daemon/serving/attach/connections.h"
#include "daemon/serving/attach/watcher.h"
#include "daemon/serving/call/services.h"
#include "daemon/serving/rpc/worker_service.h"

namespace tessera::fuzz {

class DaemonParts {
 public:
  struct Options {
    cache::Node::Options node;  // clock, device and listener are filled in
    const Clock* clock;
    Scheduler* scheduler;
    std::function<void(Clock::Duration)> pause;  // waits within a call that waits for memory
    Clock::Duration offload_idle = std::chrono::seconds(1);
    std::uint32_t pressure_high_percent = 90;
    std::uint32_t pressure_low_percent = 80;
    std::string descriptor_socket = "/x.fd";  // reported in Welcome
  };
  explicit DaemonParts(Options options);

  serving::Services& services() { return services_; }
  serving::Connections& connections() { return connections_; }
  serving::Watcher& watcher() { return *watcher_; }
  serving::WorkerService& worker() { return *worker_; }
  cache::Node& node() { return *node_; }
  const serving::AttachContext& mapped_memory() const { return door_; }

  // Destroys the watcher, whose thread must have ended. It forgets its sessions.
  void StopWatching() { watcher_.reset(); }
  // Frees all prefixes. Every session must have ended. Aborts if something of them is left.
  void ExpectNothingLeft();

 private:
  static void ExpectNothingLeft(cache::Tenant& tenant);

  Logger logger_{{.level = LogLevel::kOff}};
  Heartbeats heartbeats_;
  serving::CallLog call_log_;
  serving::Services services_;
  std::unique_ptr<cache::Node> node_;
  std::unique_ptr<compaction::Compactor> compactor_;
  std::unique_ptr<compaction::TailAbsorber> absorber_;
  std::unique_ptr<residency::Pressure> pressure_;
  serving::Connections connections_{services_};
  std::unique_ptr<serving::Watcher> watcher_;
  serving::AttachContext door_;
  std::unique_ptr<serving::WorkerService> worker_;
};

}  // namespace tessera::fuzz
