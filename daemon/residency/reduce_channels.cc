#include "daemon/residency/reduce_channels.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "daemon/base/strings.h"

namespace tessera::residency {

namespace {

struct Candidate {
  std::shared_ptr<cache::Sequence> sequence;
  Clock::TimePoint last_use;
};

std::vector<Candidate> LeastRecentFirst(const cache::Tenant& tenant) {
  std::vector<Candidate> candidates;
  for (std::shared_ptr<cache::Sequence>& sequence : tenant.Sequences()) {
    const Clock::TimePoint last_use = sequence->GetIdleState().last_use;
    candidates.push_back({std::move(sequence), last_use});
  }
  std::sort(candidates.begin(), candidates.end(),
            [](const Candidate& a, const Candidate& b) { return a.last_use < b.last_use; });
  return candidates;
}

}  // namespace

Relief ReduceChannels::RelievePressure(cache::Tenant& tenant, const Need& need) {
  Relief relief;
  relief.hindrance =
      "no policy allows re-encoding with fewer channels or bits (the option pressed)";
  for (const Candidate& candidate : LeastRecentFirst(tenant)) {
    // A lane's new form needs room beside the old one. Repeat while something is gained, since the
    // memory that one lane frees is room for the next.
    while (relief.bytes < need.bytes) {
      const compaction::Compactor::ReduceOutcome outcome =
          compactor_->Thin(*candidate.sequence, need.bytes - relief.bytes);
      relief.bytes += outcome.gained.bytes;
      relief.steps += outcome.gained.segments;
      if (!outcome.hindrance.ok()) {
        relief.hindrance = Concat("packed rows cannot be re-encoded with fewer channels: ",
                                  outcome.hindrance.message());
      } else if (outcome.allowed) {
        relief.hindrance =
            "packed rows already have as few channels as policies allow, or are shared";
      }
      if (outcome.gained.segments == 0) break;
      tenant.epochs().Collect();
    }
  }
  if (relief.bytes >= need.bytes) relief.hindrance.clear();
  return relief;
}

}  // namespace tessera::residency
