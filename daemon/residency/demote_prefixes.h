// `DemotePrefixes` is the first rung: it moves published prefixes that are unused and not pinned to
// the host tier, least recently used first. They are matched there, and a fork brings them back.
#pragma once

#include "daemon/residency/measure.h"
#include "daemon/tiers/host/host_tier.h"

namespace tessera::residency {

class DemotePrefixes final : public Measure {
 public:
  // `tier` may be disabled: the rung then frees nothing.
  explicit DemotePrefixes(const tiers::HostTier* tier) : tier_(tier) {}

  std::string_view name() const override { return "demote_prefixes"; }
  Relief RelievePressure(cache::Tenant& tenant, const Need& need) override;

 private:
  const tiers::HostTier* const tier_;
};

}  // namespace tessera::residency
