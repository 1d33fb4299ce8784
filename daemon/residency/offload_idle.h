// `OffloadIdle` is the second rung: it moves idle sequences to the host tier, longest idle first.
#pragma once

#include "daemon/cache/tenant/node.h"
#include "daemon/residency/measure.h"

namespace tessera::residency {

class OffloadIdle final : public Measure {
 public:
  struct Options {
    const Clock* clock;
    const cache::Node* node;  // whose tier takes them
    Clock::Duration idle;     // sequences used more recently are kept
    // Used instead of `idle` when a call waits. A sequence used within this time is between two
    // steps and is kept; others are offloaded, longest idle first. When the working set exceeds the
    // pool, copying rows out and in costs less than waiting for a sequence to become idle.
    Clock::Duration at_work = std::chrono::milliseconds(20);
  };
  explicit OffloadIdle(const Options& options) : options_(options) {}

  std::string_view name() const override { return "offload"; }
  Relief RelievePressure(cache::Tenant& tenant, const Need& need) override;

 private:
  // How long a sequence must have been unused to be offloaded.
  Clock::Duration RestFor(Urgency urgency) const;

  const Options options_;
};

}  // namespace tessera::residency
