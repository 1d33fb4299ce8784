#include "daemon/residency/drop_prefixes.h"

#include <algorithm>
#include <memory>

namespace tessera::residency {

namespace {

bool HoldsPoolMemory(cache::Tenant& tenant, PrefixId id) {
  const std::shared_ptr<cache::Prefix> prefix = tenant.prefixes().FindUnused(id);
  return prefix != nullptr && prefix->sequence().Describe(/*lanes=*/false).tile_bytes > 0;
}

}  // namespace

Relief DropPrefixes::RelievePressure(cache::Tenant& tenant, const Need& need) {
  Relief relief;
  std::uint64_t shared = 0;   // prefixes dropped since the rungs below went
  std::uint64_t at_most = 1;  // doubles, because each of their climbs looks at every sequence
  const auto go_again = [&] {
    shared = 0;
    at_most *= 2;
    for (Measure* const rung : below_) {
      if (relief.bytes >= need.bytes) return;
      relief.bytes +=
          rung->RelievePressure(tenant, {need.bytes - relief.bytes, need.urgency}).bytes;
    }
  };
  for (const PrefixId id : tenant.prefixes().ListUnused()) {
    if (relief.bytes >= need.bytes) return relief;
    if (!HoldsPoolMemory(tenant, id)) continue;
    const std::optional<std::uint64_t> went = tenant.prefixes().DropUnused(id);
    if (!went.has_value()) continue;
    relief.bytes += *went;
    ++relief.steps;
    if (*went == 0 && ++shared >= at_most) go_again();
  }
  if (shared > 0 && relief.bytes < need.bytes) go_again();
  if (relief.bytes < need.bytes) {
    relief.hindrance = relief.steps == 0 ? "no published prefix is unused and not pinned"
                                         : "all unused published prefixes have been dropped";
  }
  return relief;
}

}  // namespace tessera::residency
