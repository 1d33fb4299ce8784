// Room in the host tier: why there is none, and prefixes that make some. Sequences come first,
// because they are the only copy of what a worker computed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "daemon/cache/tenant/node.h"
#include "daemon/tiers/host/host_tier.h"

namespace tessera::residency {

inline constexpr std::string_view kTierDisabled =
    "the host tier is disabled (host_tier_bytes is 0)";

// Whether Sequence::Offload failed because the tier, or the tenant's share of it, has no room.
bool IsTierFull(const absl::Status& status);
// The reason, for messages. `status`: IsTierFull.
std::string FullTier(const tiers::HostTier& tier, const cache::Tenant& tenant,
                     const absl::Status& status);

// Whether the tier, and the tenant's share of it, could ever take what a sequence holds in the
// pool.
bool FitsTier(const tiers::HostTier& tier, const cache::Tenant& tenant,
              const cache::Sequence& sequence);

// Offloads a sequence. If the tier is full, prefixes in it make room, least recently used first:
// those of the tenant, then, if the tier itself is full, those of others.
absl::StatusOr<std::uint64_t> OffloadSequence(const cache::Node& node, cache::Tenant& tenant,
                                              cache::Sequence& sequence,
                                              const cache::Sequence::OffloadOptions& options = {});

}  // namespace tessera::residency
