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
    // Where a call waits: one that was used within this time is between two steps, and stays.
    // Others go, the longest idle first: to copy rows out and in again costs less than to wait for
    // an idle one while every sequence of a set that is too large has its turn.
    Clock::Duration at_work = std::chrono::milliseconds(20);
  };
  explicit OffloadIdle(const Options& options) : options_(options) {}

  std::string_view name() const override { return "offload"; }
  Relief RelievePressure(cache::Tenant& tenant, const Need& need) override;

 private:
  // For how long whoever goes must have rested.
  Clock::Duration RestFor(Urgency urgency) const;

  const Options options_;
};

}  // namespace tessera::residency
