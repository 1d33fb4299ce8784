// The "encode-tiles" job: encodes full dense tiles with the previous segment's strategy.

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "daemon/compaction/jobs/compactor.h"
#include "daemon/compaction/jobs/compactor_jobs.h"

namespace tessera::compaction {

using internal::TenantOf;

namespace {

// Lanes per job: about a millisecond of work if each lane has one new tile.
constexpr std::uint32_t kLanesPerJob = 16;

// Another lane used up the budget for raw copies since this one checked it: retry.
bool RawRoomWent(const absl::Status& status) {
  const std::optional<pool::Shortage> shortage = pool::ShortageOf(status);
  return shortage.has_value() && shortage->tag == pool::MemoryTag::kRawCopies;
}

}  // namespace

void Compactor::QueueTiles(const std::shared_ptr<cache::Sequence>& sequence, TileJob job,
                           Ticket ticket) {
  options_.scheduler->Submit(
      {.name = "encode-tiles",
       .priority = JobPriority::kTails,
       .tenant = TenantOf(*sequence),
       .owner = sequence->id().value()},
      [this, weak = std::weak_ptr(sequence), job, ticket = std::move(ticket)]() mutable {
        const std::shared_ptr<cache::Sequence> held = weak.lock();
        const std::shared_ptr<ManagedSequence> managed =
            held == nullptr ? nullptr : ManagedSequence::Of(*held);
        if (managed == nullptr) {
          // The sequence was freed, or it has no policy any more.
          if (held == nullptr || !held->TokensOfLayer(0).ok()) return;
          if (ticket.waited_for()) ticket.Report(internal::PolicyChanged(*held));
          ticket.Finish();
          return;
        }
        if (job.all && job.first == 0) managed->TilesBegin();
        const std::uint32_t end = std::min(job.end, job.first + kLanesPerJob);
        for (std::uint32_t lane = job.first; lane < end; ++lane) {
          absl::Status status = EncodeTiles(held, lane, /*waits=*/ticket.waited_for());
          if (status.ok() && ticket.waited_for() && managed->policy().uses_books() &&
              managed->FindLane(lane) != nullptr) {
            status = JoinPlain(*held, *managed, lane);
          }
          if (status.ok()) continue;
          if (ticket.waited_for()) {
            ticket.Report(status);
          } else if (!absl::IsNotFound(status)) {
            Complain(*held, "tiles not encoded", status);
          }
        }
        // Checked last: EncodeTiles uses the policy that is set when it runs.
        if (ticket.waited_for() && ManagedSequence::Of(*held) != job.waiter_policy.lock()) {
          ticket.Report(internal::PolicyChanged(*held));
        }
        job.first = end;
        if (end == job.end) {
          ticket.Finish();
        } else {
          QueueTiles(held, job, std::move(ticket));
        }
      });
}

// Tiles of a tail never make a thread wait for a seal of their lane: it has other tails to serve.
// They are left to the job that seals, which may give them a new strategy.
absl::Status Compactor::EncodeTiles(const std::shared_ptr<cache::Sequence>& sequence,
                                    std::uint32_t index, bool waits,
                                    bool for_choice) TESSERA_NO_THREAD_SAFETY_ANALYSIS {
  const std::shared_ptr<ManagedSequence> managed = ManagedSequence::Of(*sequence);
  if (managed == nullptr || managed->FindLane(index) == nullptr) return absl::OkStatus();
  ManagedLane& lane = managed->lane(index);
  if (waits) {
    lane.work->mutex.Lock();
  } else if (!lane.work->mutex.TryLock()) {
    lane.work->tiles_left.store(true);
    // The holder may have checked tiles_left before it was set.
    if (!lane.work->mutex.TryLock()) return absl::OkStatus();
  }
  lane.work->tiles_left.store(false);
  if (ManagedSequence::Of(*sequence) != managed) {  // the policy was replaced
    lane.work->mutex.Unlock();
    return EncodeTiles(sequence, index, waits, for_choice);
  }
  TilesOutcome outcome;
  const absl::Status status =
      EncodeTilesOf(*sequence, *managed, index, lane.state, for_choice, outcome);
  lane.work->mutex.Unlock();
  if (outcome.left) {
    lane.work->tiles_left.store(true);
    // The seal may have ended, and checked tiles_left, before it was set.
    if (!lane.work->seals.in_hand()) OnLaneReleased(sequence, *managed, index);
    return status;
  }
  if (outcome.more && status.ok()) lane.work->tiles_left.store(true);
  OnLaneReleased(sequence, *managed, index);
  if (!outcome.wants_seal.has_value()) return status;
  if (managed->policy().chooses()) {
    QueueKeepDecoded(sequence, managed, outcome.layer);
  } else {
    RequestSeal(sequence, *managed, index, *outcome.wants_seal);
  }
  return status;
}

absl::Status Compactor::EncodeTilesOf(cache::Sequence& sequence, ManagedSequence& managed,
                                      std::uint32_t index, LaneState& state, bool for_choice,
                                      TilesOutcome& outcome) {
  LaneCoder::Options options = CoderOptions(sequence, managed, state);
  const SealRequests& seals = managed.lane(index).work->seals;
  const bool seals_lanes = managed.policy().mosaic.has_value() && !managed.policy().chooses();
  const std::uint64_t entries_without_raw = state.entries_without_raw;
  absl::Status status;
  for (int attempt = 0; attempt < internal::kAttempts; ++attempt) {
    status =
        sequence.Recode({.lane = index,
                         .min_dense_entries = kernels::kTileEntries,
                         .counted = CounterOf(managed.policy())},
                        [&](const cache::OpenRun& run) -> LaneCoder::Swap {
                          if (managed.Interrupted(run.layer)) return std::nullopt;
                          outcome = {.layer = run.layer};
                          // Checked inside Recode: the seal of a prompt's end is requested
                          // before its rows become visible.
                          outcome.left = seals_lanes && seals.in_hand();
                          if (outcome.left) return std::nullopt;
                          state.entries_without_raw = entries_without_raw;  // undo a failed attempt
                          options.chosen_before = managed.chosen_before(run.layer);
                          // Also inside Recode: a prompt is known before its rows become visible.
                          options.encode_before = for_choice ? managed.next_stop(run.layer)
                                                             : managed.encodable_before(run.layer);
                          LaneCoder coder(options, run);
                          LaneCoder::Swap swap = coder.EncodeTiles();
                          outcome.more = coder.leaves_tiles();
                          if (coder.wants_seal()) {
                            outcome.wants_seal = {.decoded_before = coder.end_of_run()};
                          }
                          return swap;
                        });
    if (!absl::IsAborted(status) && !RawRoomWent(status)) break;
  }
  return status;
}

absl::Status Compactor::JoinPlain(cache::Sequence& sequence, ManagedSequence& managed,
                                  std::uint32_t index) {
  ManagedLane& lane = managed.lane(index);
  absl::Status status;
  {
    MutexLock lock(lane.work->mutex);
    const LaneCoder::Options options = CoderOptions(sequence, managed, lane.state);
    status = sequence.Recode({.lane = index}, [&](const cache::OpenRun& run) -> LaneCoder::Swap {
      if (managed.Interrupted(run.layer)) return std::nullopt;
      return LaneCoder(options, run).JoinPlain();
    });
  }
  OnLaneReleased(sequence.shared_from_this(), managed, index);
  // Another call is compressing the sequence, and gives its rows another form.
  return absl::IsAborted(status) ? absl::OkStatus() : status;
}

void Compactor::OnLaneReleased(const std::shared_ptr<cache::Sequence>& sequence,
                               ManagedSequence& managed, std::uint32_t lane) {
  const ManagedLane* const released = managed.FindLane(lane);
  if (released != nullptr && released->work->tiles_left.load()) {
    QueueTiles(sequence, {.first = lane, .end = lane + 1}, Ticket(nullptr));
  }
}

}  // namespace tessera::compaction
