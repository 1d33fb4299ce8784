#include "daemon/residency/demote_prefixes.h"

#include <memory>
#include <string>

#include "daemon/residency/tier_room.h"

namespace tessera::residency {

namespace {

// In a full tier, prefixes that were used even less recently make room. Returns the pool bytes.
absl::StatusOr<std::uint64_t> Demote(const tiers::HostTier& tier, cache::Tenant& tenant,
                                     const cache::Prefix& prefix) {
  for (;;) {
    absl::StatusOr<std::uint64_t> went = prefix.sequence().Offload({});
    if (went.ok() || !IsTierFull(went.status()) || !FitsTier(tier, tenant, prefix.sequence()) ||
        !tenant.prefixes().DropLeastRecentlyStored(prefix.id())) {
      return went;
    }
  }
}

}  // namespace

Relief DemotePrefixes::RelievePressure(cache::Tenant& tenant, const Need& need) {
  Relief relief;
  if (!tier_->enabled()) {
    relief.hindrance = kTierDisabled;
    return relief;
  }
  for (const PrefixId id : tenant.prefixes().ListUnused()) {
    if (relief.bytes >= need.bytes) break;
    const std::shared_ptr<cache::Prefix> prefix = tenant.prefixes().FindUnused(id);
    if (prefix == nullptr || !prefix->sequence().GetIdleState().may_go) continue;
    const absl::StatusOr<std::uint64_t> went = Demote(*tier_, tenant, *prefix);
    if (went.ok()) {
      relief.bytes += *went;
      relief.steps += *went > 0;
    } else if (IsTierFull(went.status())) {
      relief.hindrance = FullTier(*tier_, tenant, went.status());
    }
  }
  if (relief.steps > 0) tenant.epochs().Collect();
  if (relief.bytes >= need.bytes) {
    relief.hindrance.clear();
  } else if (relief.hindrance.empty()) {
    relief.hindrance = "no published prefix in the pool is unused, not pinned and not shared";
  }
  return relief;
}

}  // namespace tessera::residency
