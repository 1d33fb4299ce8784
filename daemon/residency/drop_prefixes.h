// `DropPrefixes` is the first rung: it drops published prefixes that are unused and not pinned,
// least recently used first.
#pragma once

#include "daemon/residency/measure.h"

namespace tessera::residency {

class DropPrefixes final : public Measure {
 public:
  std::string_view name() const override { return "drop_prefixes"; }
  Relief RelievePressure(cache::Tenant& tenant, const Need& need) override;
};

}  // namespace tessera::residency
