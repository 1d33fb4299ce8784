// Seals that cannot be carried out now: which wait for memory, which for their lane, and when they
// come again.

#include <algorithm>
#include <optional>

#include "absl/cleanup/cleanup.h"
#include "daemon/base/strings.h"
#include "daemon/compaction/compactor.h"
#include "daemon/compaction/compactor_jobs.h"

namespace tessera::compaction {

using internal::TenantOf;

absl::Status Compactor::SealOrStall(const std::shared_ptr<cache::Sequence>& sequence,
                                    std::uint32_t lane, bool waits, Turn& turn) {
  const std::shared_ptr<ManagedSequence> managed = ManagedSequence::Of(*sequence);
  if (managed == nullptr) return absl::OkStatus();
  std::optional<LaneCoder::Cut> cut = managed->SealBegins(lane);
  const absl::Cleanup ends = [&, took = cut.has_value()] {
    if (took) managed->SealEnds(lane);
  };
  // Another job may have taken it on, and failed: whoever waits is told of the work itself.
  if (waits) cut = LaneCoder::Cut::kPromptEnd;
  // Where there is none, somebody else's seal has done the work already; and where tokens are
  // chosen, what seals is the choice.
  const policies::Policy& policy = managed->policy();
  if (!cut.has_value() || !policy.mosaic.has_value()) return absl::OkStatus();
  if (policy.chooses()) {
    if (!waits) return absl::OkStatus();
    return absl::AbortedError(
        Concat("the policy of ", sequence->id().ToString(), " has changed; ask again"));
  }
  // Those before it have found no memory.
  const bool joins = !waits && !turn.again() && stalled_.Any(TenantOf(*sequence));
  absl::Status status;
  if (!joins) {
    // What could not be carried out before is part of it.
    if (const auto stalled = managed->TakeStalledSeal(lane)) cut = std::max(*cut, *stalled);
    status = Seal(*sequence, *managed, lane, *cut);
    if (status.ok()) turn.Found();
  }
  // Also where somebody is told: a prompt may have come to its end there, and that is not
  // forgotten.
  const bool no_memory = joins || absl::IsResourceExhausted(status);
  if (no_memory || absl::IsAborted(status)) managed->StallSeal(lane, *cut);
  if (!no_memory) return status;
  // Whatever came of the line comes to its end again, so that there is a pause.
  if (!managed->lane(lane).work->seal_in_line.exchange(true) || turn.again()) {
    turn.Stall({.tenant = TenantOf(*sequence), .sequence = sequence, .lane = lane});
  }
  return status;
}

// That one, or the first behind it that still has something to do.
void Compactor::QueueStalled(std::optional<StalledSeals::Item> item) {
  for (; item.has_value(); item = stalled_.Next(item->tenant, /*found=*/false)) {
    const std::shared_ptr<cache::Sequence> sequence = item->sequence.lock();
    const std::shared_ptr<ManagedSequence> managed =
        sequence == nullptr ? nullptr : ManagedSequence::Of(*sequence);
    if (managed == nullptr) continue;
    managed->lane(item->lane).work->seal_in_line.store(false);
    // One that has been moved out keeps nobody waiting.
    if (sequence->Describe(/*lanes=*/false).offloaded) continue;
    const std::optional<LaneCoder::Cut> cut = managed->TakeStalledSeal(item->lane);
    if (!cut.has_value()) continue;
    managed->WantSeal(item->lane, *cut);
    QueueSeal(sequence, item->lane, Ticket(nullptr), /*again=*/true);
    return;
  }
}

void Compactor::QueueParked(const std::shared_ptr<cache::Sequence>& sequence,
                            ManagedSequence& managed) {
  for (std::uint32_t lane = 0; lane < sequence->model().lanes(); ++lane) {
    LaneWork& work = *managed.lane(lane).work;
    if (work.seal_stalled.load() == 0 || work.seal_in_line.load()) continue;
    const std::optional<LaneCoder::Cut> cut = managed.TakeStalledSeal(lane);
    if (cut.has_value() && managed.WantSeal(lane, *cut)) {
      QueueSeal(sequence, lane, Ticket(nullptr));
    }
  }
}

std::optional<Clock::Duration> Compactor::Resume() {
  const Clock::TimePoint now = options_.clock->Now();
  for (const StalledSeals::Item& item : stalled_.TakeDue(now)) QueueStalled(item);
  return stalled_.DueIn(now);
}

}  // namespace tessera::compaction
