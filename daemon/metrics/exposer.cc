#include "daemon/metrics/exposer.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <exception>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/base/strings.h"
#include "daemon/metrics/exposition.h"
#include "prometheus/collectable.h"
#include "prometheus/exposer.h"

namespace tessera::metrics {
namespace {

class AllMetricsCollectable final : public prometheus::Collectable {
 public:
  explicit AllMetricsCollectable(const Metrics& metrics) : metrics_(metrics) {}
  std::vector<prometheus::MetricFamily> Collect() const override { return Scrape(metrics_); }

 private:
  const Metrics& metrics_;
};

// Finds out why listening failed by trying again directly, because the HTTP library gives no
// reason. OK if it works now; the caller then reports the library's own message.
absl::Status WhyNotListening(const std::string& address) {
  const std::size_t colon = address.rfind(':');
  if (colon == std::string::npos) return absl::InvalidArgumentError("expected host:port");
  std::string host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);

  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), address.c_str() + colon + 1, &hints, &found);
  if (error != 0) return absl::NotFoundError(gai_strerror(error));

  absl::Status status;
  const int fd = socket(found->ai_family, found->ai_socktype | SOCK_CLOEXEC, found->ai_protocol);
  const int on = 1;
  if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
      bind(fd, found->ai_addr, found->ai_addrlen) != 0 || listen(fd, 1) != 0) {
    const int cause = errno;
    status = cause == EADDRINUSE ? absl::AlreadyExistsError("the port is in use by another process")
                                 : absl::ErrnoToStatus(cause, "the system refuses to listen there");
  }
  if (fd >= 0) close(fd);
  freeaddrinfo(found);
  return status;
}

}  // namespace

// The order of members matters: the server must stop before what it serves is destroyed.
class Exposer::Impl {
 public:
  Impl(const std::string& address, const Metrics& metrics)
      : collectable_(std::make_shared<AllMetricsCollectable>(metrics)),
        // The timeout bounds how long a peer that stalls a request can hold a thread.
        server_({"listening_ports", address, "num_threads", "4", "request_timeout_ms", "2000"}) {
    server_.RegisterCollectable(collectable_, "/metrics");
  }

  std::uint16_t port() const { return static_cast<std::uint16_t>(server_.GetListeningPorts()[0]); }

 private:
  const std::shared_ptr<AllMetricsCollectable> collectable_;
  prometheus::Exposer server_;
};

Exposer::Exposer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Exposer::~Exposer() = default;

absl::StatusOr<std::unique_ptr<Exposer>> Exposer::Start(const std::string& address,
                                                        const Metrics& metrics) {
  std::string library_words;
  // The HTTP library throws if it cannot bind the port.
  try {
    return std::unique_ptr<Exposer>(new Exposer(std::make_unique<Impl>(address, metrics)));
  } catch (const std::exception& error) {
    library_words = error.what();
  }
  const std::string what = Concat("metrics address \"", address, "\": ");
  if (absl::Status cause = WhyNotListening(address); !cause.ok()) {
    return absl::Status(cause.code(), Concat(what, cause.message()));
  }
  return absl::UnavailableError(Concat(what, library_words));
}

std::uint16_t Exposer::port() const { return impl_->port(); }

}  // namespace tessera::metrics
