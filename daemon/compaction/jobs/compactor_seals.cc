// Queues and runs seals, and retries those that found no memory or a busy lane.

#include <memory>
#include <optional>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "daemon/base/strings.h"
#include "daemon/compaction/jobs/compactor.h"
#include "daemon/compaction/jobs/compactor_jobs.h"

namespace tessera::compaction {

using internal::TenantOf;

void Compactor::RequestSeal(const std::shared_ptr<cache::Sequence>& sequence,
                            ManagedSequence& managed, std::uint32_t lane, const SealRequest& wish) {
  if (managed.lane(lane).work->seals.Want(wish)) {
    QueueSeal(sequence, {.lane = lane}, Ticket(nullptr));
  }
}

std::vector<std::uint32_t> Compactor::RequestPromptEnd(ManagedSequence& managed,
                                                       const cache::Model& model,
                                                       const Rows& rows) {
  std::vector<std::uint32_t> first;
  const policies::Policy& policy = managed.policy();
  if (!policy.mosaic.has_value() || policy.chooses()) return first;
  const shm::LaneLayout& layout = model.layout();
  for (std::uint32_t layer = rows.first_layer; layer < rows.first_layer + rows.layers; ++layer) {
    for (std::uint32_t head = 0; head < layout.kv_heads(layer); ++head) {
      const std::uint32_t lane = layout.lane(layer, head);
      if (managed.lane(lane).work->seals.Want({.all_before = rows.until})) first.push_back(lane);
    }
  }
  return first;
}

void Compactor::QueueSeal(const std::shared_ptr<cache::Sequence>& sequence, const SealJob& job,
                          Ticket ticket) {
  options_.scheduler->Submit(
      {.name = "seal",
       .priority = JobPriority::kSeals,
       .tenant = TenantOf(*sequence),
       .owner = sequence->id().value(),
       // Continuations run first, so that at most one lane per thread holds old and new form.
       .is_continuation = job.is_continuation},
      [this, weak = std::weak_ptr(sequence), job, ticket = std::move(ticket),
       tenant = TenantOf(*sequence)]() mutable {
        Turn turn(*this, tenant, job.again);
        const std::shared_ptr<cache::Sequence> held = weak.lock();
        if (held == nullptr) return;
        bool is_continuation = false;
        const absl::Status status = SealOrStall(held, job, turn, is_continuation);
        if (is_continuation) {
          turn.PassOn();
          SealJob next = job;
          next.is_continuation = true;
          QueueSeal(held, next, std::move(ticket));
          return;
        }
        if (ticket.waited_for()) {
          ticket.Report(status);
          ticket.Finish();
        } else if (!status.ok() && !absl::IsNotFound(status)) {
          Complain(*held, "segment not sealed", status);
        }
      });
}

std::optional<absl::Status> Compactor::Seal(cache::Sequence& sequence, ManagedSequence& managed,
                                            std::uint32_t index, bool& is_continuation) {
  ManagedLane& lane = managed.lane(index);
  MutexLock lock(lane.work->mutex);
  // A job that begins after SetPolicy must follow the new policy.
  if (ManagedSequence::Of(sequence).get() != &managed) return std::nullopt;
  const LaneCoder::Options options = CoderOptions(sequence, managed, lane.state);
  absl::Status status;
  std::optional<DenseRows> left;
  for (int attempt = 0; attempt < internal::kAttempts; ++attempt) {
    status = sequence.Recode({.lane = index, .counted = CounterOf(managed.policy())},
                             [&](const cache::OpenRun& run) {
                               LaneCoder coder(options, run);
                               LaneCoder::Swap swap = coder.Seal(lane.work->seals.running());
                               is_continuation = coder.is_continuation();
                               left = coder.left_dense();
                               return swap;
                             });
    is_continuation = is_continuation && status.ok();
    if (!absl::IsAborted(status)) break;
  }
  if (!is_continuation) lane.state.begun.reset();
  if (absl::IsResourceExhausted(status)) left = DenseBecause(status);
  if (!is_continuation && left.has_value()) Note(lane.left_dense, *std::move(left), 1);
  return status;
}

absl::Status Compactor::SealOrStall(const std::shared_ptr<cache::Sequence>& sequence,
                                    const SealJob& job, Turn& turn, bool& is_continuation) {
  const auto nothing_done = [&]() -> absl::Status {
    return job.told == 0 ? absl::OkStatus() : internal::PolicyChanged(*sequence);
  };
  const std::shared_ptr<ManagedSequence> before = ManagedSequence::Of(*sequence);
  if (before == nullptr) return nothing_done();
  const std::shared_ptr<LaneWork> work = before->lane(job.lane).work;
  // The caller's request was made for a lane of an earlier policy.
  if (job.told != 0 && job.waiter_lane != work) return nothing_done();
  // False: another job has carried out the requests already. A caller's own request is listed
  // separately, so that it gets the result of the work even if another job took it and failed.
  if (!work->seals.Begin(job.told)) return nothing_done();
  const absl::Cleanup ends = [&] {
    work->seals.End();
    if (is_continuation) return;
    work->seals.Forget(job.told);
    // After End: tiles are left to a seal that is queued or running.
    OnLaneReleased(sequence, *before, job.lane);
  };
  // Earlier seals have found no memory, so this one joins the queue.
  const bool joins =
      job.told == 0 && !turn.again() && !job.is_continuation && stalled_.Any(TenantOf(*sequence));
  std::optional<absl::Status> sealed;
  bool as_asked = true;
  while (!sealed.has_value()) {
    // Read the policy only now: the request may belong to one that was set meanwhile.
    const std::shared_ptr<ManagedSequence> managed = ManagedSequence::Of(*sequence);
    if (managed == nullptr || !managed->policy().mosaic.has_value()) return nothing_done();
    // If the policy chooses tokens, the choice seals them.
    if (managed->policy().chooses()) return nothing_done();
    if (joins) break;
    work->seals.AdoptDeferred();
    sealed = Seal(*sequence, *managed, job.lane, is_continuation);
    as_asked = job.told == 0 || managed == job.waiter_policy.lock();
  }
  const absl::Status status = sealed.value_or(absl::OkStatus());
  if (!joins && status.ok() && !is_continuation) turn.Found();
  // A requested seal keeps the sequence from being offloaded before the continuation runs.
  if (is_continuation) work->seals.RequeueRunning();
  // Also if a caller gets the error: the end of a prompt must not be forgotten.
  const bool no_memory = joins || absl::IsResourceExhausted(status);
  if (no_memory || absl::IsAborted(status)) work->seals.Stall();
  // A retry goes to the end of the queue again, so that there is a pause.
  if (no_memory && (!work->seal_in_line.exchange(true) || turn.again())) {
    turn.Stall({.tenant = TenantOf(*sequence), .sequence = sequence, .lane = job.lane});
  }
  return as_asked ? status : nothing_done();
}

// Queues this seal, or the next deferred one that still has work.
void Compactor::QueueDeferred(std::optional<DeferredSeals::Item> item) {
  for (; item.has_value(); item = stalled_.Next(item->tenant, /*found=*/false)) {
    const std::shared_ptr<cache::Sequence> sequence = item->sequence.lock();
    const std::shared_ptr<ManagedSequence> managed =
        sequence == nullptr ? nullptr : ManagedSequence::Of(*sequence);
    if (managed == nullptr) continue;
    LaneWork& work = *managed->lane(item->lane).work;
    work.seal_in_line.store(false);
    // An offloaded sequence must not hold up others; its next rows queue the seal again.
    if (sequence->Describe(/*lanes=*/false).offloaded) continue;
    if (!work.seals.RequeueDeferred()) continue;
    QueueSeal(sequence, {.lane = item->lane, .again = true}, Ticket(nullptr));
    return;
  }
}

void Compactor::QueueDeferredOf(const std::shared_ptr<cache::Sequence>& sequence,
                                ManagedSequence& managed) {
  if (managed.FindLane(0) == nullptr) return;
  for (std::uint32_t lane = 0; lane < sequence->model().lanes(); ++lane) {
    LaneWork& work = *managed.lane(lane).work;
    if (work.seal_in_line.load() || !work.seals.RequeueDeferred()) continue;
    QueueSeal(sequence, {.lane = lane}, Ticket(nullptr));
  }
}

std::optional<Clock::Duration> Compactor::Resume() {
  const Clock::TimePoint now = options_.clock->Now();
  for (const DeferredSeals::Item& item : stalled_.TakeDue(now)) QueueDeferred(item);
  return stalled_.DueIn(now);
}

}  // namespace tessera::compaction
