#include "daemon/residency/drop_prefixes.h"

namespace tessera::residency {

Relief DropPrefixes::RelievePressure(cache::Tenant& tenant, const Need& need) {
  Relief relief;
  while (relief.bytes < need.bytes) {
    const std::optional<std::uint64_t> went = tenant.prefixes().DropLeastRecentlyUsed();
    if (!went.has_value()) {
      relief.hindrance = relief.steps == 0 ? "no published prefix is unused and not pinned"
                                           : "all unused published prefixes have been dropped";
      return relief;
    }
    relief.bytes += *went;
    ++relief.steps;
  }
  return relief;
}

}  // namespace tessera::residency
