// `Measure` is one rung of the pressure ladder: one way to reclaim pool memory from a tenant.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "daemon/base/clock.h"
#include "daemon/cache/tenant/tenant.h"

namespace tessera::residency {

// Who waits for the memory.
enum class Urgency : std::uint8_t {
  kNone,     // no caller waits
  kCall,     // a call waits
  kOverdue,  // a call has used up half of its patience
};

struct Need {
  std::uint64_t bytes = 0;
  Urgency urgency = Urgency::kNone;
};

// The result of a measure.
struct Relief {
  std::uint64_t bytes = 0;  // pool bytes, free once their readers are done
  std::uint64_t steps = 0;  // number of actions: sequences offloaded, prefixes dropped
  // Why it did not free more, for messages; empty if it freed enough.
  std::string hindrance{};
  // When a retry may free more, if only time is missing.
  std::optional<Clock::Duration> wait{};
};

// Thread-safe. Called without any lock held.
class Measure {
 public:
  virtual ~Measure() = default;
  // Used as a metric label, such as "offload".
  virtual std::string_view name() const = 0;
  // Frees about `need.bytes` of the tenant's pool memory, or what is available. Objects in use are
  // kept.
  virtual Relief RelievePressure(cache::Tenant& tenant, const Need& need) = 0;
};

}  // namespace tessera::residency
