// Server: listens, runs the gRPC services and the watcher, holds the sessions, and drains at the
// end.
#pragma once

#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/base/mutex.h"
#include "daemon/base/published.h"
#include "daemon/base/strings.h"
#include "daemon/config/address.h"
#include "daemon/guard/guarded_sockets.h"
#include "daemon/http/server.h"
#include "daemon/metrics/process.h"
#include "daemon/platform/heap.h"
#include "daemon/platform/lock_file.h"
#include "daemon/platform/peer_rules.h"
#include "daemon/platform/unix_socket.h"
#include "daemon/serving/attach/acceptor.h"
#include "daemon/serving/attach/connections.h"
#include "daemon/serving/attach/tenant_registrar.h"
#include "daemon/serving/attach/watcher.h"
#include "daemon/serving/call/services.h"
#include "daemon/serving/node_collector.h"
#include "daemon/serving/rpc/admin_refusal.h"
#include "daemon/serving/rpc/admin_service.h"
#include "daemon/serving/rpc/health_service.h"
#include "daemon/serving/rpc/worker_service.h"
#include "daemon/serving/tls.h"

namespace tessera::serving {

// Owned by RunDaemon, which also owns the Services. Errors of Create and Start end the daemon.
class Server {
 public:
  struct UnixEndpoint {
    std::string path;
    unsigned mode;
  };
  struct Options {
    std::vector<UnixEndpoint> unix_endpoints;
    PeerRules unix_peers;    // for all of them
    std::string admin_path;  // Unix socket of the operator's service; empty: none
    std::vector<config::HostPort> tcp_endpoints;
    std::chrono::seconds tcp_peer_limit{30};
    std::uint32_t max_sessions = 64;               // of all tenants; connections are limited by it
    TlsFiles tls;                                  // for tcp_endpoints
    std::optional<config::HostPort> http_address;  // of metrics and health; nullopt: none
    Clock::Duration drain_limit{};
    std::uint64_t memory_limit_bytes = 0;  // of this machine and its cgroups; 0: unknown
  };

  // Locks the socket paths and creates the watcher. ALREADY_EXISTS, with the path, if a live daemon
  // serves one of them. NOT_FOUND, with the way to make it, if the directory of one is missing;
  // only that of the default address is made here. `services.node` may still be unset; Start needs
  // it. Attention() may be called before Start.
  static absl::StatusOr<std::unique_ptr<Server>> Create(Services& services, const Options& options);
  ~Server();

  // Wakes the watcher, because the cache has memory waiting for readers or lost an extent.
  // Thread-safe.
  void Attention() { watcher_->Attention(); }

  // Called when the device has failed. The health service then reports NOT_SERVING, and all
  // sessions end, because their memory is lost. The daemon keeps answering calls. Thread-safe.
  void RetireDevice(const absl::Status& why);

  // Listens on all addresses and starts the threads. Errors name the address.
  absl::Status Start();

  // Refuses new sessions, notifies the workers, and waits until the last session has ended or the
  // limit has passed. It then ends the remaining sessions and stops the server's threads: after it
  // returns, none of them uses the cache or the scheduler. Idempotent, thread-safe.
  void Drain(Clock::Duration limit);
  // Shortens the limit of a current or later drain to `limit`; never extends it. Thread-safe.
  void ShortenDrain(Clock::Duration limit) {
    connections_.ShortenDrain(services_.clock->Now() + limit);
  }

  // The addresses it listens on, with the bound ports: "unix:PATH", "host:port".
  std::vector<std::string> addresses() const;
  std::uint16_t http_port() const { return http_ == nullptr ? 0 : http_->port(); }

  // What a reload changes. Connections that exist go on. Thread-safe.
  void SetUnixPeers(PeerRules peers) { unix_peers_.Set(std::move(peers)); }
  // Adapts limits that depend on the number of tenants. Call it after Start. Thread-safe.
  void TenantsChanged() {
    worker_service_->TenantsChanged();
    registrar_->SetTenants(services_.node->tenants().size());
  }

  // Sets the actions of the operator's calls. Call it before Start.
  void set_admin_actions(AdminService::Actions actions) { admin_actions_ = std::move(actions); }

 private:
  Server(Services& services, const Options& options);
  absl::Status LockPaths();
  absl::Status StartGrpc();
  absl::Status StartAdmin(std::vector<Acceptor::Door>& doors);
  absl::Status OpenUnixDoors(std::vector<Acceptor::Door>& doors);
  absl::StatusOr<std::vector<Acceptor::Door>> OpenTcpDoors(grpc::ServerBuilder& builder);
  absl::StatusOr<Acceptor::Door> UnixDoor(const UnixEndpoint& endpoint,
                                          const std::unique_ptr<grpc::Server>& server);
  bool Tick();
  void EndSessions(Clock::Duration limit);

  Services& services_;
  const Options options_;
  Published<PeerRules> unix_peers_;
  std::vector<LockFile> locks_;
  std::vector<std::string> bound_;  // Unix socket paths to unlink
  Connections connections_;
  std::unique_ptr<Watcher> watcher_;
  const metrics::ProcessMetrics process_;
  std::unique_ptr<NodeCollector> collector_;
  metrics::Metrics::Registration process_registration_;
  metrics::Metrics::Registration registration_;
  std::unique_ptr<http::Server> http_;
  AdminService::Actions admin_actions_;
  std::unique_ptr<WorkerService> worker_service_;
  std::unique_ptr<AdminService> admin_service_;
  std::unique_ptr<HealthService> health_service_;
  AdminRefusal admin_refusal_;
  CallDeadlines ungreeted_{GuardedSockets::kUnknownLimit};
  TokenDelay token_delay_;
  LogRateLimit attach_refusals_;
  HeapTrimmer heap_;  // for the acceptor's thread
  std::unique_ptr<TenantRegistrar> registrar_;
  // Workers and operators have servers of their own: calls of the ones do not delay the others, and
  // neither can name a method of the other's service.
  std::unique_ptr<grpc::Server> grpc_;
  std::unique_ptr<grpc::Server> admin_grpc_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> tcp_;
  std::vector<std::uint16_t> tcp_ports_;
  std::unique_ptr<Acceptor> acceptor_;  // for all addresses, until gRPC shuts down
  Mutex drain_mutex_;
  bool drained_ TESSERA_GUARDED_BY(drain_mutex_) = false;
};

// Paths of the files next to a gRPC socket.
inline std::string DescriptorPath(const std::string& unix_path) {
  return Concat(unix_path, kDescriptorSuffix);
}
inline std::string LockPath(const std::string& unix_path) { return Concat(unix_path, kLockSuffix); }

}  // namespace tessera::serving
