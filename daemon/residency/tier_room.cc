#include "daemon/residency/tier_room.h"

#include <algorithm>
#include <memory>
#include <optional>

#include "daemon/base/bytes.h"
#include "daemon/base/strings.h"
#include "daemon/pool/account.h"

namespace tessera::residency {

// A Shortage concerns the pool or the tenant's share of the tier. Without one, the tier itself has
// no room.
bool IsTierFull(const absl::Status& status) {
  if (!absl::IsResourceExhausted(status)) return false;
  const std::optional<pool::Shortage> shortage = pool::ShortageOf(status);
  return !shortage.has_value() || shortage->tag == pool::MemoryTag::kOffloaded;
}

std::string FullTier(const tiers::HostTier& tier, const cache::Tenant& tenant,
                     const absl::Status& status) {
  if (!pool::ShortageOf(status).has_value()) {
    return Concat("the host tier is full: ", FormatBytes(tier.used_bytes()), " of ",
                  FormatBytes(tier.limit_bytes()));
  }
  const pool::Account& own = tenant.offloaded();
  return Concat("the tenant's share of the host tier is full: ", FormatBytes(own.used_bytes()),
                " of ", FormatBytes(own.limit_bytes()));
}

bool FitsTier(const tiers::HostTier& tier, const cache::Tenant& tenant,
              const cache::Sequence& sequence) {
  const cache::Sequence::Description held = sequence.Describe(/*lanes=*/false);
  const std::uint64_t bytes = held.tile_bytes - held.shared_tile_bytes;
  const std::uint64_t own = tenant.offloaded().limit_bytes();  // 0: only the tier's applies
  return bytes <= tier.limit_bytes() && (own == 0 || bytes <= own);
}

namespace {

bool MakeRoom(const cache::Node& node, cache::Tenant& tenant, const absl::Status& status) {
  if (tenant.prefixes().DropLeastRecentlyStored()) return true;
  if (pool::ShortageOf(status).has_value()) return false;
  return std::ranges::any_of(node.tenants(), [](const std::unique_ptr<cache::Tenant>& other) {
    return other->prefixes().DropLeastRecentlyStored();
  });
}

}  // namespace

absl::StatusOr<std::uint64_t> OffloadSequence(const cache::Node& node, cache::Tenant& tenant,
                                              cache::Sequence& sequence,
                                              const cache::Sequence::OffloadOptions& options) {
  for (;;) {
    absl::StatusOr<std::uint64_t> went = sequence.Offload(options);
    if (went.ok() || !IsTierFull(went.status()) || !FitsTier(node.host_tier(), tenant, sequence) ||
        !MakeRoom(node, tenant, went.status())) {
      return went;
    }
  }
}

}  // namespace tessera::residency
