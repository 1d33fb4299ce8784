// Exposer: the HTTP server that answers GET /metrics.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/metrics/metrics.h"

namespace tessera::metrics {

class Exposer {
 public:
  // Listens on `address`, "host:port"; port 0 takes any free port. ALREADY_EXISTS if the port is in
  // use, else the system's error; both name the address. `metrics` must outlive the exposer.
  static absl::StatusOr<std::unique_ptr<Exposer>> Start(const std::string& address,
                                                        const Metrics& metrics);
  ~Exposer();
  Exposer(const Exposer&) = delete;
  Exposer& operator=(const Exposer&) = delete;

  std::uint16_t port() const;

 private:
  class Impl;
  explicit Exposer(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::metrics
