// Accepts what connects to a Unix socket, asks the kernel who it is, and hands it on.
//
// gRPC would accept by itself, and never ask. On a thread of its own: the watcher's waits for locks
// of tenants now and then.
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
    PeerRules peers;
    Logger* logger;
    const Clock* clock;
    // Of whoever may connect; called on the acceptor's thread. The socket does not block.
    std::function<void(Fd socket)> take;
  };
  // Binds: whoever connects waits for Start.
  static absl::StatusOr<std::unique_ptr<UnixAcceptor>> Listen(Options options);
  ~UnixAcceptor();

  void Start();

 private:
  UnixAcceptor(Options options, Fd listening, Event stop)
      : options_(std::move(options)), listening_(std::move(listening)), stop_(std::move(stop)) {}

  void Run();
  void LogRefused(std::string_view what, const absl::Status& why);
  // True where it is time to stop.
  bool Wait(bool for_newcomers) const;

  const Options options_;
  const Fd listening_;
  const Event stop_;
  Seldom refusals_;
  std::thread thread_;
};

}  // namespace tessera::serving
