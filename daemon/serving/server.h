// The daemon as a whole: its doors, its leases, its threads, from start to drained exit.
#pragma once

#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/base/mutex.h"
#include "daemon/base/strings.h"
#include "daemon/config/address.h"
#include "daemon/metrics/exposer.h"
#include "daemon/platform/lock_file.h"
#include "daemon/platform/peer_rules.h"
#include "daemon/serving/attach/connections.h"
#include "daemon/serving/attach/unix_acceptor.h"
#include "daemon/serving/attach/watcher.h"
#include "daemon/serving/call/services.h"
#include "daemon/serving/rpc/admin_service.h"
#include "daemon/serving/rpc/describe.h"
#include "daemon/serving/rpc/worker_service.h"
#include "daemon/serving/tls.h"

namespace tessera::serving {

class Server {
 public:
  struct UnixDoor {
    std::string path;
    unsigned mode;
    PeerRules peers;
  };
  struct Options {
    std::vector<UnixDoor> unix_doors;
    std::vector<std::string> tcp_doors;  // "host:port"
    TlsFiles tls;                        // for them
    std::string metrics_address;         // empty: none
    Clock::Duration drain_limit{};
  };

  // Listens. ALREADY_EXISTS where a live daemon holds a socket path; names the address that failed.
  // `services.node` is not yet needed: Attention() may be called before Serve.
  static absl::StatusOr<std::unique_ptr<Server>> Create(Services& services, const Options& options);
  ~Server();

  // Something in the cache wants the event loop's attention. Thread-safe.
  void Attention() { watcher_->Attention(); }

  // The device has failed: says so to the health service, and cuts the sessions, whose memory it
  // was. Thread-safe; the daemon goes on answering.
  void RetireDevice(const absl::Status& why);

  // Opens the doors and starts the threads.
  absl::Status Start();

  // Refuses new sessions, tells the workers, and returns when the last one has gone or the limit
  // has passed; what is left is cut then, and no thread of the server's uses the cache or the
  // scheduler any more. Idempotent, thread-safe.
  void Drain(Clock::Duration limit);
  // A drain under way, or one to come, ends within this limit, if its own is not shorter.
  // Thread-safe.
  void Hurry(Clock::Duration limit) { connections_.Hurry(services_.clock->Now() + limit); }

  // Where it listens, ports as they were bound: "unix:PATH", "host:port".
  std::vector<std::string> addresses() const;
  std::uint16_t metrics_port() const { return exposer_ == nullptr ? 0 : exposer_->port(); }

  // Called by the Drain RPC; main waits on its own.
  void set_drain_request(std::function<void(std::uint64_t)> request) {
    drain_request_ = std::move(request);
  }

 private:
  Server(Services& services, const Options& options);
  absl::Status LockPaths();
  absl::Status StartGrpc();
  absl::Status AcceptOn(const UnixDoor& door, grpc::ServerBuilder& builder);
  void EndSessions(Clock::Duration limit);

  Services& services_;
  const Options options_;
  std::vector<LockFile> locks_;
  std::vector<std::string> bound_;  // Unix sockets
  Connections connections_;
  std::unique_ptr<Watcher> watcher_;
  std::unique_ptr<NodeCollector> collector_;
  metrics::Metrics::Registration registration_;
  std::unique_ptr<metrics::Exposer> exposer_;
  std::function<void(std::uint64_t)> drain_request_;
  std::unique_ptr<WorkerService> worker_service_;
  std::unique_ptr<AdminService> admin_service_;
  std::unique_ptr<grpc::Server> grpc_;
  // What is accepted there, for gRPC: until it shuts down.
  std::vector<std::unique_ptr<UnixAcceptor>> acceptors_;
  std::vector<int> tcp_ports_;
  Mutex drain_mutex_;
  bool drained_ TESSERA_GUARDED_BY(drain_mutex_) = false;
};

// Where the descriptor socket of a gRPC socket stands.
inline std::string DescriptorPath(const std::string& unix_path) {
  return Concat(unix_path, config::kDescriptorSuffix);
}
inline std::string LockPath(const std::string& unix_path) {
  return Concat(unix_path, config::kLockSuffix);
}

}  // namespace tessera::serving
