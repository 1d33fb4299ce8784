// Acceptor accepts the connections of all gRPC addresses, checks the peers of Unix sockets, puts
// each connection under guard, and passes it on. gRPC's own listeners check nothing, and those for
// TCP never accept again once descriptors have run out.
//
// It has its own thread, because the watcher's thread sometimes waits for tenants' locks.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/published.h"
#include "daemon/base/rate_limit.h"
#include "daemon/guard/guarded_sockets.h"
#include "daemon/metrics/metrics.h"
#include "daemon/platform/event_loop.h"
#include "daemon/platform/fd.h"
#include "daemon/platform/peer_rules.h"

namespace tessera::serving {

class Acceptor {
 public:
  struct Door {
    std::string address;  // for messages
    Fd listening;         // non-blocking
    // For Unix sockets: the rules of the moment of a connection apply. nullptr: no rules.
    const Published<PeerRules>* peers = nullptr;
    bool tcp = false;
    bool tls = false;
    bool trusted = false;  // connections need no session
    // Receives each admitted connection (non-blocking, guarded), on the acceptor's thread.
    std::function<void(Fd socket)> take;
  };
  struct Options {
    std::vector<Door> doors;
    Registrar* registrar;
    Logger* logger;
    metrics::Metrics* metrics;
    const Clock* clock;
    std::chrono::seconds peer_limit;  // of TCP connections (SetPeerLimit)
    std::size_t most_connections;     // of all doors
    // Called about once a second while there are connections, or while it returns true.
    std::function<bool()> tick;
  };
  // Most connections without a session; a quarter of all where that is less.
  static constexpr std::size_t kMostUnknown = 256;

  // Connections are accepted from now on.
  static absl::StatusOr<std::unique_ptr<Acceptor>> Start(Options options);
  ~Acceptor();

 private:
  Acceptor(Options options, Event stop, Event waits)
      : options_(std::move(options)),
        stop_(std::move(stop)),
        waits_(std::make_shared<Event>(std::move(waits))) {}

  void Run();
  // Waits for connections, a pause or a tick. True if it is time to stop.
  bool Wait(std::vector<bool>& awaited, bool for_newcomers) const;
  // False: descriptors have run out.
  bool AcceptFrom(const Door& door);
  std::size_t MostUnknown() const { return std::min(kMostUnknown, options_.most_connections / 4); }
  void Admit(const Door& door, Fd socket);
  void ResumeReading();
  void Tick();

  // Counts, and logs at most one line a second. Connections use it, too, and may outlive the
  // acceptor.
  class Refusals {
   public:
    explicit Refusals(const Options& options)
        : logger_(*options.logger), metrics_(*options.metrics), clock_(*options.clock) {}
    // `why`: PERMISSION_DENIED for a peer, RESOURCE_EXHAUSTED for a limit, DEADLINE_EXCEEDED for an
    // unknown peer, else the protocol.
    void Report(std::string_view what, std::string_view address, const absl::Status& why);

   private:
    Logger& logger_;
    metrics::Metrics& metrics_;
    const Clock& clock_;
    LogRateLimit lines_;
  };

  const Options options_;
  const Event stop_;
  const std::shared_ptr<Event> waits_;  // connections use it, too, and may outlive the acceptor
  const std::shared_ptr<Refusals> refusals_ = std::make_shared<Refusals>(options_);
  GuardedSockets::Counts counts_;
  bool some_wait_ = false;  // connections that must not read now
  int ticks_left_ = 0;  // until it rests: what connections held is freed some time after their end
  std::thread thread_;
};

}  // namespace tessera::serving
