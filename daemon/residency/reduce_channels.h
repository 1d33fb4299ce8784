// `ReduceChannels` is the last rung: it re-encodes sealed segments with fewer channels if their
// policy allows it (option `pressed`). The least recently used sequences come first, oldest
// segments first.
#pragma once

#include "daemon/compaction/jobs/compactor.h"
#include "daemon/residency/measure.h"

namespace tessera::residency {

class ReduceChannels final : public Measure {
 public:
  explicit ReduceChannels(compaction::Compactor* compactor) : compactor_(compactor) {}

  std::string_view name() const override { return "thin"; }
  Relief RelievePressure(cache::Tenant& tenant, const Need& need) override;

 private:
  compaction::Compactor* const compactor_;
};

}  // namespace tessera::residency
