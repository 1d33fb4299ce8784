#include "daemon/residency/offload_idle.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "daemon/base/strings.h"
#include "daemon/residency/tier_room.h"

namespace tessera::residency {

namespace {

struct Candidate {
  std::shared_ptr<cache::Sequence> sequence;
  Clock::TimePoint last_use;
};

}  // namespace

Clock::Duration OffloadIdle::RestFor(Urgency urgency) const {
  if (urgency == Urgency::kOverdue) return Clock::Duration(0);
  return urgency == Urgency::kCall ? std::min(options_.idle, options_.at_work) : options_.idle;
}

Relief OffloadIdle::RelievePressure(cache::Tenant& tenant, const Need& need) {
  Relief relief;
  const tiers::HostTier& tier = options_.node->host_tier();
  if (!tier.enabled()) {
    relief.hindrance = kTierDisabled;
    return relief;
  }
  const Clock::TimePoint now = options_.clock->Now();
  const Clock::Duration rest = RestFor(need.urgency);
  std::vector<Candidate> idle;
  std::uint64_t in_use = 0;
  for (std::shared_ptr<cache::Sequence>& sequence : tenant.Sequences()) {
    const cache::Sequence::Rest seen = sequence->GetIdleState();
    if (!seen.may_go && !seen.at_work) continue;
    if (seen.may_go && now - seen.last_use >= rest) {
      idle.push_back({std::move(sequence), seen.last_use});
      continue;
    }
    ++in_use;
    const Clock::Duration wait = seen.at_work ? rest : rest - (now - seen.last_use);
    relief.wait = std::min(relief.wait.value_or(wait), wait);
  }
  std::sort(idle.begin(), idle.end(),
            [](const Candidate& a, const Candidate& b) { return a.last_use < b.last_use; });

  bool full = false;
  // The second pass retries sequences whose tail could not be closed in a full pool, since others
  // have made room by then.
  for (int pass = 0; pass < 2 && relief.bytes < need.bytes && !idle.empty() && !full; ++pass) {
    std::vector<Candidate> again;
    for (Candidate& candidate : idle) {
      if (relief.bytes >= need.bytes || full) break;
      const absl::StatusOr<std::uint64_t> went = OffloadSequence(
          *options_.node, tenant, *candidate.sequence, {.unused_since = candidate.last_use});
      if (went.ok()) {
        relief.bytes += *went;
        relief.steps += *went > 0;
      } else if (IsTierFull(went.status())) {
        // No room for this sequence, but perhaps for another.
        const pool::Account& own = tenant.offloaded();
        // A reload may have made the limit smaller than what is used.
        full = pool::ShortageOf(went.status()).has_value()
                   ? own.used_bytes() > own.limit_bytes() - own.limit_bytes() / 64
                   : tier.free_bytes() < tier.limit_bytes() / 64;
        relief.hindrance = FullTier(tier, tenant, went.status());
      } else if (absl::IsResourceExhausted(went.status())) {
        again.push_back(std::move(candidate));
      }
    }
    idle = std::move(again);
    if (relief.steps > 0) tenant.epochs().Collect();
  }
  if (relief.bytes >= need.bytes) {
    relief.hindrance.clear();
    relief.wait.reset();
  } else if (relief.hindrance.empty()) {
    relief.hindrance = in_use == 0 ? std::string("no sequence is idle")
                                   : Concat(in_use, in_use == 1 ? " sequence is" : " sequences are",
                                            " in use or not idle for long enough");
  } else {
    relief.wait.reset();  // waiting makes no room in the tier
  }
  return relief;
}

}  // namespace tessera::residency
