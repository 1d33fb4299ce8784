// A rung of the ladder: one way to get memory back from a tenant that does without it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "daemon/base/clock.h"
#include "daemon/cache/tenant/tenant.h"

namespace tessera::residency {

// What a climb is for.
enum class Urgency : std::uint8_t {
  kNone,     // nobody waits for it
  kCall,     // a call does
  kOverdue,  // for half of its patience already
};

struct Need {
  std::uint64_t bytes = 0;
  Urgency urgency = Urgency::kNone;
};

// What a measure has done.
struct Relief {
  std::uint64_t bytes = 0;  // of the pool, free when their readers have moved on
  std::uint64_t steps = 0;  // sequences offloaded, prefixes dropped
  // Why it was not more, for messages; empty where it was enough.
  std::string hindrance{};
  // When asking again may give more, where only time stands in the way.
  std::optional<Clock::Duration> wait{};
};

// Thread-safe; called without any lock.
class Measure {
 public:
  virtual ~Measure() = default;
  // A metric label: "offload".
  virtual std::string_view name() const = 0;
  // Gets about so many bytes back, or what there is. What somebody uses stays where it is.
  virtual Relief RelievePressure(cache::Tenant& tenant, const Need& need) = 0;
};

}  // namespace tessera::residency
