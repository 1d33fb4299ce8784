// ProcessMetrics: what Prometheus's own libraries report of every process.
#pragma once

#include <cstdint>
#include <optional>

#include "daemon/metrics/collector.h"

namespace tessera::metrics {

// Thread-safe. A figure that the system does not give, as in a sandbox without /proc, is left out.
class ProcessMetrics final : public Collector {
 public:
  // `memory_limit_bytes` 0: the headroom is left out.
  explicit ProcessMetrics(std::uint64_t memory_limit_bytes = 0);
  void Collect(Visitor& visitor) const override;

 private:
  // Seconds since 1970. Read once, because the difference of two clocks changes when one is set.
  const std::optional<double> start_time_;
  const std::uint64_t memory_limit_bytes_;
};

}  // namespace tessera::metrics
