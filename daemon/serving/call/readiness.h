// Whether the daemon accepts work: one answer for the metrics, health checks and operators.
#pragma once

#include "absl/status/status.h"
#include "daemon/serving/call/services.h"

namespace tessera::serving {

// OK if workers can attach; else UNAVAILABLE, or the device's failure, with the reason.
inline absl::Status Readiness(const Services& services) {
  if (services.draining.load()) {
    return absl::UnavailableError("the daemon is draining and accepts no new sessions");
  }
  if (!services.serving.load()) return absl::UnavailableError("the daemon is starting");
  return services.device->health();
}

}  // namespace tessera::serving
