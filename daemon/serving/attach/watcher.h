// Watcher is the daemon's event loop on one thread. It serves descriptor sockets and sessions' wake
// events, frees memory when its readers are done, expires prefixes, and resumes compaction. Idle,
// it wakes only for its heartbeat. It serves a few requests per peer and turn, so that no peer
// blocks the others.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "daemon/base/mutex.h"
#include "daemon/base/published.h"
#include "daemon/base/rate_limit.h"
#include "daemon/cache/tenant/node.h"
#include "daemon/platform/event_loop.h"
#include "daemon/platform/peer_rules.h"
#include "daemon/serving/attach/descriptor_connection.h"
#include "daemon/serving/call/services.h"

namespace tessera::serving {

// Owned by the Server.
class Watcher {
 public:
  // Called on the watcher's thread.
  struct Listener {
    virtual ~Listener() = default;
    // The session's descriptor socket was closed: its process exited, or broke the protocol.
    virtual void DescriptorSocketClosed(SessionId session) = 0;
    // Extents of the tenant's pool were removed: its mapped sessions must unmap them.
    virtual void PoolExtentsRemoved(cache::Tenant& tenant) = 0;
  };

  static absl::StatusOr<std::unique_ptr<Watcher>> Create(Services& services, Listener& listener);
  ~Watcher();

  // Adds a descriptor socket to accept on. Call before Start. `peers` outlives this object.
  absl::Status Listen(const std::string& path, unsigned mode, const Published<PeerRules>& peers);
  void Start();
  // Stops the thread and waits for its end. Idempotent.
  void Stop();

  // Thread-safe, any time after Start.
  void AddSession(std::shared_ptr<cache::SessionState> session);
  void RemoveSession(SessionId session);
  // Call when memory waits for readers, or an extent was removed.
  void Attention() { wake_.Signal(); }

 private:
  using Command = absl::AnyInvocable<void() &&>;
  struct Watched {
    std::shared_ptr<cache::SessionState> session;
    std::unique_ptr<DescriptorConnection> witness;
    bool awaits_staging = false;  // its requests wait meanwhile
  };
  struct Unopened {
    std::unique_ptr<DescriptorConnection> connection;
    Clock::TimePoint until;
  };

  Watcher(Services& services, Listener& listener, EventLoop loop, Event wake);
  void Run();
  void Post(Command command);
  void RunCommands();
  absl::Status WatchListening(int fd);
  void Accept(int listening);
  void PauseAccepting(const absl::Status& why);
  void Serve(int fd);
  int OldestUnopened() const;
  void RejectUnopened(int fd, const absl::Status& why);
  void DropUnopened(int fd);
  // Logs at most one line per second.
  void LogRefused(const absl::Status& why);
  void ServeWitness(SessionId id, EventLoop::Ready ready);
  // Creates the session's staging memory in the background, and then serves its requests again.
  void CreateStaging(const std::shared_ptr<cache::SessionState>& session);
  void StagingCreated(SessionId id, const absl::Status& created);
  void AwaitImporterExit(SessionId id, Watched watched);
  void DiscardUntilClosed(SessionId id);
  void NotifyShrunkPools();
  // Each does its due work and returns the time until it must run again; nullopt: no timer needed.
  std::optional<absl::Duration> CollectAll();
  std::optional<absl::Duration> SweepPrefixes();
  std::optional<absl::Duration> DropLateOpenings();
  std::optional<absl::Duration> ResumeAccepting();
  std::optional<absl::Duration> ResumeCompaction();

  Services& services_;
  Listener& listener_;
  Heartbeats::Pulse& pulse_;
  EventLoop loop_;
  Event wake_;
  std::atomic<bool> stopping_{false};
  std::vector<Fd> listening_;
  const Published<PeerRules>* peers_ = nullptr;   // for all descriptor sockets
  std::optional<Clock::TimePoint> accept_again_;  // set while out of descriptors
  std::unordered_map<int, Unopened> unopened_;
  LogRateLimit refusals_;
  std::unordered_map<SessionId, Watched> sessions_;
  // Ended sessions whose workers still map memory. That memory must not be freed until the worker
  // closes its descriptor socket.
  std::unordered_map<SessionId, Watched> departing_;
  std::unordered_map<const cache::Tenant*, std::uint64_t> told_;  // removed extents last reported
  Mutex mutex_;
  std::vector<Command> commands_ TESSERA_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace tessera::serving
