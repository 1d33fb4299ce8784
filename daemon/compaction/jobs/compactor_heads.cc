// Sequences that take over the rows of a published head, and what has been decided about them.

#include <memory>

#include "absl/status/status.h"
#include "daemon/base/strings.h"
#include "daemon/compaction/jobs/compactor.h"

namespace tessera::compaction {

namespace {

// Of such a sequence no more is known, if anything, than where chunks of its text have ended.
bool IsDense(const std::shared_ptr<ManagedSequence>& managed) {
  return managed == nullptr || managed->policy().text == policies::Policy().text;
}

}  // namespace

// Jobs for it wait meanwhile: a seal that was answered ABORTED would be lost.
absl::Status Compactor::TakeHeadOf(cache::Sequence& sequence, const cache::Sequence& other) {
  for (;;) {
    const std::shared_ptr<ManagedSequence> managed = ManagedSequence::Of(sequence);
    const std::shared_ptr<ManagedSequence> theirs = ManagedSequence::Of(other);
    if (managed == nullptr && IsDense(theirs)) return sequence.TakeHeadOf(other).status();
    if (absl::Status status = MayTakeHead(sequence, other); !status.ok()) return status;
    if (managed == nullptr || (theirs == nullptr && !IsDense(managed))) {
      continue;  // another policy by now
    }
    absl::StatusOr<cache::Sequence::HeadTaken> taken = absl::UnknownError("not asked");
    {
      const ManagedSequence::Pause pause(*managed);
      if (ManagedSequence::Of(sequence) != managed) continue;  // another policy by now
      const ManagedSequence::LanesHeld lanes(*managed);
      taken = sequence.TakeHeadOf(other);
      // Where it holds tokens behind them, every token has stayed, and it knows more of them. What
      // is learnt of a lane is made anew where its run is another.
      if (taken.ok() && *taken == cache::Sequence::HeadTaken::kAll && theirs != nullptr) {
        // A head takes no head itself, so that nobody waits the other way round.
        const ManagedSequence::Pause their_pause(*theirs);
        if (ManagedSequence::Of(other) == theirs) {
          managed->TakeDecisionsOf(*theirs, pause, their_pause);
        }
      }
    }
    for (std::uint32_t lane = 0; lane < sequence.model().lanes(); ++lane) {
      LaneFree(sequence.shared_from_this(), *managed, lane);
    }
    return taken.status();
  }
}

// Where both are under one policy, and what that has decided is done in all lanes.
absl::Status Compactor::MayTakeHead(const cache::Sequence& sequence, const cache::Sequence& other) {
  const policies::Policy own = PolicyOf(sequence);
  const policies::Policy theirs = PolicyOf(other);
  if (own.text != theirs.text) {
    return absl::FailedPreconditionError(Concat(sequence.id().ToString(), " is under policy ",
                                                Quoted(own.text), ", ", other.id().ToString(),
                                                " under ", Quoted(theirs.text)));
  }
  const std::shared_ptr<ManagedSequence> managed = ManagedSequence::Of(other);
  for (std::uint32_t layer = 0; layer < other.model().layers(); ++layer) {
    if (managed == nullptr || !managed->Interrupted(layer)) continue;
    return absl::FailedPreconditionError(Concat("a choice for layer ", layer, " of ",
                                                other.id().ToString(),
                                                " has been carried out in some of its lanes"));
  }
  return absl::OkStatus();
}

}  // namespace tessera::compaction
