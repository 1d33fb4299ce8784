// Compactor::AdoptPrefix: a sequence adopts the segments of a published prefix, and the decisions
// that were made about them.

#include <memory>

#include "absl/status/status.h"
#include "daemon/base/strings.h"
#include "daemon/compaction/jobs/compactor.h"

namespace tessera::compaction {

namespace {

// A dense sequence has no managed state, or only knows its chunk boundaries.
bool IsDense(const std::shared_ptr<ManagedSequence>& managed) {
  return managed == nullptr || managed->policy().text == policies::Policy().text;
}

}  // namespace

// Jobs of the sequence are held off meanwhile: a seal that failed with ABORTED would be lost.
absl::Status Compactor::AdoptPrefix(cache::Sequence& sequence, const cache::Sequence& other) {
  for (;;) {
    const std::shared_ptr<ManagedSequence> managed = ManagedSequence::Of(sequence);
    const std::shared_ptr<ManagedSequence> theirs = ManagedSequence::Of(other);
    if (managed == nullptr && IsDense(theirs)) return sequence.AdoptPrefix(other).status();
    if (absl::Status status = CheckAdoptable(sequence, other); !status.ok()) return status;
    if (managed == nullptr || (theirs == nullptr && !IsDense(managed))) {
      continue;  // the policy was replaced meanwhile
    }
    absl::StatusOr<cache::Sequence::PrefixAdoption> taken = absl::UnknownError("not asked");
    {
      const ManagedSequence::Pause pause(*managed);
      if (ManagedSequence::Of(sequence) != managed) continue;  // the policy was replaced
      const ManagedSequence::LanesHeld lanes(*managed);
      taken = sequence.AdoptPrefix(other);
      // A sequence that holds more tokens than the prefix dropped none of them, and its own state
      // is newer. Lane states are rebuilt when their run has changed.
      if (taken.ok() && *taken == cache::Sequence::PrefixAdoption::kAll && theirs != nullptr) {
        // A prefix never adopts a prefix, so pausing both cannot deadlock.
        const ManagedSequence::Pause their_pause(*theirs);
        if (ManagedSequence::Of(other) == theirs) {
          managed->AdoptDecisions(*theirs, pause, their_pause);
        }
      }
    }
    for (std::uint32_t lane = 0; lane < sequence.model().lanes(); ++lane) {
      OnLaneReleased(sequence.shared_from_this(), *managed, lane);
    }
    return taken.status();
  }
}

// Both must have the same policy, and no decision may be partly carried out.
absl::Status Compactor::CheckAdoptable(const cache::Sequence& sequence,
                                       const cache::Sequence& other) {
  const policies::Policy own = PolicyOf(sequence);
  const policies::Policy theirs = PolicyOf(other);
  if (own.text != theirs.text) {
    return absl::FailedPreconditionError(Concat(sequence.id().ToString(), " has policy ",
                                                Quoted(own.text), ", but ", other.id().ToString(),
                                                " has ", Quoted(theirs.text)));
  }
  const std::shared_ptr<ManagedSequence> managed = ManagedSequence::Of(other);
  for (std::uint32_t layer = 0; layer < other.model().layers(); ++layer) {
    if (managed == nullptr || !managed->Interrupted(layer)) continue;
    return absl::FailedPreconditionError(
        Concat("a decision about layer ", layer, " of ", other.id().ToString(),
               " has been carried out in some lanes only; retry when it is complete"));
  }
  return absl::OkStatus();
}

}  // namespace tessera::compaction
