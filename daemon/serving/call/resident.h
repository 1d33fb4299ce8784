// Helpers for handlers that need the rows of a sequence, or memory for them, in the pool.
#pragma once

#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "daemon/cache/tenant/tenant.h"
#include "daemon/serving/call/services.h"

namespace tessera::serving {

// Finds a sequence, restores it if it was offloaded, and keeps it in the pool while the Residence
// lives. NOT_FOUND, or RESOURCE_EXHAUSTED if the pool is full. Every handler that uses a sequence's
// rows must find it this way.
inline absl::StatusOr<cache::Residence> FindResident(cache::Tenant& tenant, SequenceId id) {
  const absl::StatusOr<std::shared_ptr<cache::Sequence>> sequence = tenant.FindSequence(id);
  if (!sequence.ok()) return sequence.status();
  return (*sequence)->Restore();
}

// Runs `act`, and retries it if the pool was full, after residency has reclaimed memory. `act` must
// change nothing when it fails. Holds no locks or sequences between the attempts.
inline absl::Status RetryWhenPoolFull(const Services& services, cache::Tenant& tenant,
                                      absl::FunctionRef<bool()> cancelled,
                                      absl::FunctionRef<absl::Status()> act) {
  return services.pressure->RetryWhenPoolFull(
      tenant, act, [&] { return cancelled() || services.stopping.load(); });
}

}  // namespace tessera::serving
