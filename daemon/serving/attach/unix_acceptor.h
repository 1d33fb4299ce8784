// UnixAcceptor accepts connections on a Unix socket, checks each peer's credentials, and passes the
// socket on. gRPC's own listener does not check credentials.
//
// It has its own thread, because the watcher's thread sometimes waits for tenants' locks.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "absl/status/statusor.h"
#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/published.h"
#include "daemon/base/rate_limit.h"
#include "daemon/platform/event_loop.h"
#include "daemon/platform/fd.h"
#include "daemon/platform/peer_rules.h"

namespace tessera::serving {

class UnixAcceptor {
 public:
  struct Options {
    std::string path;
    unsigned mode;
    const Published<PeerRules>* peers;  // those of the moment of a connection apply
    Logger* logger;
    const Clock* clock;
    // Receives each admitted connection (non-blocking), on the acceptor's thread.
    std::function<void(Fd socket)> take;
  };
  // Binds and listens. Connections are accepted after Start.
  static absl::StatusOr<std::unique_ptr<UnixAcceptor>> Listen(Options options);
  ~UnixAcceptor();

  void Start();

 private:
  UnixAcceptor(Options options, Fd listening, Event stop)
      : options_(std::move(options)), listening_(std::move(listening)), stop_(std::move(stop)) {}

  void Run();
  void LogRefused(std::string_view what, const absl::Status& why);
  // Waits for a connection or a pause. Returns true if it is time to stop.
  bool Wait(bool for_newcomers) const;

  const Options options_;
  const Fd listening_;
  const Event stop_;
  LogRateLimit refusals_;
  std::thread thread_;
};

}  // namespace tessera::serving
