// The daemon's one waiting thread: descriptor sockets, wake events of sessions, and the timers of
// readers that memory waits for and of prefixes. Idle, it sleeps in one epoll_wait without a
// timeout. Nobody's requests keep it for long: it serves a few of each peer, and goes round.
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
#include "daemon/base/rate_limit.h"
#include "daemon/cache/tenant/node.h"
#include "daemon/platform/event_loop.h"
#include "daemon/platform/peer_rules.h"
#include "daemon/serving/attach/descriptor_connection.h"
#include "daemon/serving/call/services.h"

namespace tessera::serving {

class Watcher {
 public:
  // Called on the watcher's thread.
  struct Listener {
    virtual ~Listener() = default;
    // The session's descriptor socket hung up: its process is gone, or broke the protocol.
    virtual void WitnessLost(SessionId session) = 0;
    // Extents of the tenant's pool went: its mapped sessions should unmap them.
    virtual void PoolShrunk(cache::Tenant& tenant) = 0;
  };

  static absl::StatusOr<std::unique_ptr<Watcher>> Create(Services& services, Listener& listener);
  ~Watcher();

  // Before Start: a descriptor socket to accept on.
  absl::Status Listen(const std::string& path, unsigned mode, const PeerRules& peers = {});
  void Start();
  // Returns when the thread has ended: nothing is served after. Idempotent.
  void Stop();

  // Thread-safe, any time after Start.
  void AddSession(std::shared_ptr<cache::SessionState> session);
  void RemoveSession(SessionId session);
  // Something waits for readers, or an extent went.
  void Attention() { wake_.Signal(); }

 private:
  using Command = absl::AnyInvocable<void() &&>;
  struct Watched {
    std::shared_ptr<cache::SessionState> session;
    std::unique_ptr<DescriptorConnection> witness;
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
  void GiveUpOn(int fd, const absl::Status& why);
  void DropUnopened(int fd);
  // One line a second at most.
  void LogRefused(const absl::Status& why);
  void ServeWitness(SessionId id, EventLoop::Ready ready);
  void SeeOff(SessionId id, Watched watched);
  void ServeDeparting(SessionId id);
  void TellOfShrunkPools();
  // Each returns how long until the next look.
  std::optional<absl::Duration> CollectAll();
  std::optional<absl::Duration> SweepPrefixes();
  std::optional<absl::Duration> DropLateOpenings();
  std::optional<absl::Duration> ResumeAccepting();
  std::optional<absl::Duration> ResumeCompaction();

  Services& services_;
  Listener& listener_;
  EventLoop loop_;
  Event wake_;
  std::atomic<bool> stopping_{false};
  std::vector<Fd> listening_;
  PeerRules peers_;                               // of whoever connects there
  std::optional<Clock::TimePoint> accept_again_;  // the process was out of descriptors
  std::unordered_map<int, Unopened> unopened_;
  Seldom refusals_;
  std::unordered_map<SessionId, Watched> sessions_;
  // Sessions that have ended while their workers map memory that must not be given back before they
  // have closed it: closing the descriptor socket is how they say so.
  std::unordered_map<SessionId, Watched> departing_;
  std::unordered_map<const cache::Tenant*, std::uint64_t> told_;  // extents gone, last told of
  Mutex mutex_;
  std::vector<Command> commands_ TESSERA_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace tessera::serving
