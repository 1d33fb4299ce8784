// A sequence whose rows a handler works on: in the pool, and there until the handler has done.
#pragma once

#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "daemon/cache/tenant/tenant.h"
#include "daemon/serving/call/services.h"

namespace tessera::serving {

// Brings it back where it was offloaded. NOT_FOUND; RESOURCE_EXHAUSTED where the pool has no room.
// Every handler of a sequence's rows finds it by this.
inline absl::StatusOr<cache::Residence> FindResident(cache::Tenant& tenant, SequenceId id) {
  const absl::StatusOr<std::shared_ptr<cache::Sequence>> sequence = tenant.FindSequence(id);
  if (!sequence.ok()) return sequence.status();
  return (*sequence)->Restore();
}

// Does something that changes nothing where it fails; where the pool has no room it is done again
// when there is some. Holds nothing in between.
inline absl::Status WithRelief(const Services& services, cache::Tenant& tenant,
                               absl::FunctionRef<bool()> cancelled,
                               absl::FunctionRef<absl::Status()> act) {
  return services.pressure->WithRelief(tenant, act,
                                       [&] { return cancelled() || services.stopping.load(); });
}

}  // namespace tessera::serving
