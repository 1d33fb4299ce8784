#include "daemon/residency/drop_prefixes.h"

namespace tessera::residency {

Relief DropPrefixes::RelievePressure(cache::Tenant& tenant, std::uint64_t bytes) {
  Relief relief;
  while (relief.bytes < bytes) {
    const std::optional<std::uint64_t> went = tenant.prefixes().DropLeastRecentlyUsed();
    if (!went.has_value()) {
      if (relief.steps == 0) relief.hindrance = "no published prefix is unused and not pinned";
      return relief;
    }
    relief.bytes += *went;
    ++relief.steps;
  }
  return relief;
}

}  // namespace tessera::residency
