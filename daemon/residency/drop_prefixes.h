// `DropPrefixes` is the third rung: it drops published prefixes that are unused and not pinned and
// that no tier has taken, least recently used first. Segments that a prefix shares with idle
// sequences or other prefixes can leave the pool once it is gone, so the rungs below go again.
#pragma once

#include <vector>

#include "daemon/residency/measure.h"

namespace tessera::residency {

class DropPrefixes final : public Measure {
 public:
  // `below`: rungs that may free what dropped prefixes have shared. They outlive this object.
  explicit DropPrefixes(std::vector<Measure*> below) : below_(std::move(below)) {}

  std::string_view name() const override { return "drop_prefixes"; }
  Relief RelievePressure(cache::Tenant& tenant, const Need& need) override;

 private:
  const std::vector<Measure*> below_;
};

}  // namespace tessera::residency
