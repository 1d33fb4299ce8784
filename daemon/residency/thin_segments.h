// `ThinSegments` is the last rung: it re-encodes sealed segments with fewer channels if their
// policy allows it (option `pressed`). The least recently used sequences come first, oldest
// segments first.
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
