// The rung that has sealed segments keep fewer channels, where their policy allows it (`pressed`):
// of the sequences that were used least recently first, of each the oldest segments first.
#pragma once

#include "daemon/compaction/jobs/compactor.h"
#include "daemon/residency/measure.h"

namespace tessera::residency {

class ThinSegments final : public Measure {
 public:
  explicit ThinSegments(compaction::Compactor* compactor) : compactor_(compactor) {}

  std::string_view name() const override { return "thin"; }
  Relief RelievePressure(cache::Tenant& tenant, const Need& need) override;

 private:
  compaction::Compactor* const compactor_;
};

}  // namespace tessera::residency
