// Joins the short segments of lanes that are close to the segment limit, before they are
// compressed.

#include <memory>
#include <optional>

#include "absl/cleanup/cleanup.h"
#include "daemon/base/strings.h"
#include "daemon/cache/sequence/join.h"
#include "daemon/compaction/jobs/compactor.h"

namespace tessera::compaction {

absl::Status Compactor::JoinCrowdedLanes(const std::shared_ptr<cache::Sequence>& sequence) {
  bool exhausted = false;
  for (const std::uint32_t lane : sequence->LanesNearSegmentLimit(cache::kCrowded)) {
    bool joined = true;
    while (joined) {
      joined = false;
      absl::Status status = JoinSome(sequence, lane, joined);
      if (status.ok()) continue;
      if (!absl::IsResourceExhausted(status)) return status;
      exhausted = true;
      break;
    }
  }
  // If there is no memory for copies, a lane is left as it is while it can take another segment.
  if (!exhausted || sequence->LanesNearSegmentLimit(shm::kMaxSegments - 1).empty())
    return absl::OkStatus();
  return absl::ResourceExhaustedError(Concat(
      sequence->id().ToString(), " has lanes with the maximum of ", shm::kMaxSegments,
      " segments, and there is no memory for the copies needed to join them; free sequences, or "
      "raise the tenant's limit"));
}

absl::Status Compactor::JoinSome(const std::shared_ptr<cache::Sequence>& sequence,
                                 std::uint32_t lane, bool& joined) {
  const auto join = [&](const cache::OpenRun& run) {
    absl::StatusOr<std::optional<cache::LaneSwap>> swap =
        cache::JoinShortSegments(sequence->memory(), run);
    joined = swap.ok() && swap->has_value();
    return swap;
  };
  // One job per lane at a time, whatever the policy.
  const std::shared_ptr<ManagedSequence> managed = ManagedSequence::Of(*sequence);
  if (managed == nullptr) return sequence->Recode({.lane = lane, .whole = true}, join);
  const absl::Cleanup free = [&] { OnLaneReleased(sequence, *managed, lane); };
  MutexLock lock(managed->lane(lane).work->mutex);
  return sequence->Recode({.lane = lane, .whole = true}, join);
}

}  // namespace tessera::compaction
