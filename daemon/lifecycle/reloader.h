// Reloader applies a changed configuration to the running daemon.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/base/mutex.h"
#include "daemon/base/published.h"
#include "daemon/cache/tenant/node.h"
#include "daemon/config/config.h"
#include "daemon/config/validate.h"
#include "daemon/lifecycle/bounded_read.h"
#include "daemon/metrics/collector.h"
#include "daemon/platform/service_manager.h"
#include "daemon/serving/call/services.h"
#include "daemon/serving/rpc/admin_service.h"
#include "daemon/serving/server.h"

namespace tessera::lifecycle {

// Owned by RunDaemon. Thread-safe.
class Reloader final : public metrics::Collector {
 public:
  using Reloaded = serving::AdminService::Reloaded;
  struct Options {
    // Reads file and command line anew. The result is complete and valid. Owns what it uses, since
    // it may hang.
    std::function<absl::StatusOr<config::Config>()> load;
    config::DeviceMemory memory;
    Published<config::Config>* running;
    serving::Services* services;
    serving::Server* server;
    const ServiceManager* manager;
  };
  explicit Reloader(const Options& options);

  // Checks everything, then applies the reloadable fields, all or nothing, and logs the result. One
  // reload runs at a time. FAILED_PRECONDITION while the daemon drains, DEADLINE_EXCEEDED if the
  // files cannot be read in time.
  absl::StatusOr<Reloaded> Reload();

  void Collect(metrics::Visitor& visitor) const override;

 private:
  // Everything that a reload reads from files.
  struct Files {
    absl::StatusOr<config::Config> config;
    absl::Status tls;
    std::size_t tls_hash;  // of the content of the TLS files
  };
  absl::StatusOr<Reloaded> Apply() TESSERA_REQUIRES(mutex_);
  void Report(const absl::StatusOr<Reloaded>& reloaded);

  const Options options_;
  Mutex mutex_;
  BoundedRead<Files> files_ TESSERA_GUARDED_BY(mutex_);
  std::size_t tls_hash_ TESSERA_GUARDED_BY(mutex_);  // of the TLS files in use
  std::atomic<bool> successful_{true};
  std::atomic<double> success_time_;  // seconds since 1970; at first, the time of the start
};

// The tenants of a configuration as the node wants them.
std::vector<cache::Node::TenantOptions> TenantsOf(const config::Config& config);

// The TLS files of a configuration.
serving::TlsFiles TlsFilesOf(const config::Config& config);

}  // namespace tessera::lifecycle
