// The rung that moves idle sequences to the host tier, the longest idle first.
#pragma once

#include "daemon/residency/measure.h"

namespace tessera::residency {

class OffloadIdle final : public Measure {
 public:
  struct Options {
    const Clock* clock;
    const tiers::HostTier* tier;
    Clock::Duration idle;  // one that was used within this time stays
  };
  explicit OffloadIdle(const Options& options) : options_(options) {}

  std::string_view name() const override { return "offload"; }
  Relief RelievePressure(cache::Tenant& tenant, std::uint64_t bytes) override;

 private:
  const Options options_;
};

}  // namespace tessera::residency
