// How a sequence's rows move to the host tier and back: taken under the lock, copied without it,
// published under it.

#include <algorithm>
#include <utility>

#include "daemon/base/error_cause.h"
#include "daemon/base/strings.h"
#include "daemon/cache/segment/stored.h"
#include "daemon/cache/sequence/sequence.h"

namespace tessera::cache {

void Residence::Reset() {
  if (sequence_ != nullptr) std::exchange(sequence_, nullptr)->Leave();
}

void Sequence::Leave() {
  MutexLock lock(mutex_);
  --residents_;
  Used();
}

void Sequence::Used() { last_use_ = memory_.clock->Now(); }

absl::Status Sequence::Resident() const {
  if (absl::Status status = Usable(); !status.ok() || !offloaded_) return status;
  return WithCause(
      absl::AbortedError(Concat(id_.ToString(), " is in the host tier; restore it first")),
      ErrorCause::kSequenceBusy);
}

absl::Status Sequence::MayOffload() const {
  if (absl::Status status = Usable(); !status.ok()) return status;
  const bool recoding =
      std::any_of(lanes_.begin(), lanes_.end(), [](const Lane& lane) { return lane.recoding; });
  const std::shared_ptr<Companion> companion = this->companion();
  if (packing_ || recoding || (companion != nullptr && companion->Busy())) {
    return WithCause(
        absl::AbortedError(Concat(id_.ToString(), " is being compressed; retry when that is done")),
        ErrorCause::kSequenceBusy);
  }
  if (moving_ || residents_ > 0) {
    return WithCause(absl::AbortedError(Concat(
                         id_.ToString(), " is in use by another call; retry when it is done")),
                     ErrorCause::kSequenceBusy);
  }
  const std::shared_ptr<const TailHandle> tail = this->tail();
  if (tail != nullptr && tail->InStep()) {
    return WithCause(absl::AbortedError(Concat(
                         id_.ToString(), " is in a step of its worker; retry when it has ended")),
                     ErrorCause::kSequenceBusy);
  }
  return absl::OkStatus();
}

// Prevents new steps: a step that marks itself after this check finds the tail closed. A step that
// marked itself first keeps its tail.
absl::Status Sequence::CloseTailBetweenSteps() {
  const std::shared_ptr<const TailHandle> tail = this->tail();
  if (tail == nullptr) return absl::OkStatus();
  block().tail_generation.store(0);
  if (!tail->InStep()) return CloseTailLocked();
  block().tail_generation.store(tail->generation());
  return WithCause(absl::AbortedError(Concat(
                       id_.ToString(), " is in a step of its worker; retry when it has ended")),
                   ErrorCause::kSequenceBusy);
}

absl::Status Sequence::Transfer(absl::FunctionRef<absl::Status()> copy) const {
  const Clock::TimePoint begun = memory_.clock->Now();
  absl::Status status = copy();
  if (status.ok()) {
    memory_.host_tier->transfers().durations.Observe(memory_.clock->Now() - begun);
    return status;
  }
  const std::optional<pool::Shortage> shortage = pool::ShortageOf(status);
  const bool of_pool = shortage.has_value() && shortage->tag != pool::MemoryTag::kOffloaded;
  if (!of_pool) memory_.host_tier->transfers().errors.fetch_add(1, std::memory_order_relaxed);
  return status;
}

absl::StatusOr<std::uint64_t> Sequence::Offload(const OffloadOptions& options) {
  Offloading work(memory_);  // outlives the lock: its destructor frees pool memory
  Replaced replaced;
  std::uint64_t version = 0;
  {
    MutexLock lock(mutex_);
    if (absl::Status status = MayOffload(); !status.ok()) return status;
    if (options.unused_since.has_value() && LastUseLocked() > *options.unused_since) {
      return WithCause(absl::AbortedError(Concat(id_.ToString(), " has been used in the meantime")),
                       ErrorCause::kSequenceBusy);
    }
    if (absl::Status status = CloseTailBetweenSteps(); !status.ok()) return status;
    version = block().version.load();
    for (Lane& lane : lanes_) {
      work.Take(lane);
      // Closed as if shared with a fork: rows that arrive now go to another segment. If the offload
      // fails, the lane may reopen it.
      lane.open = false;
    }
    if (work.empty()) return std::uint64_t{0};
    moving_ = true;
  }
  absl::Status status = Transfer([&work] { return work.Run(); });
  MutexLock lock(mutex_);
  moving_ = false;
  moving_done_.NotifyAll();
  if (status.ok()) status = MayOffload();
  if (!status.ok()) return status;
  if (block().version.load() != version) {
    return WithCause(
        absl::AbortedError(Concat(id_.ToString(), " has changed in the meantime; retry")),
        ErrorCause::kSequenceBusy);
  }
  const std::uint64_t bytes = work.bytes();
  Withdraw(work, replaced);
  work.ReleaseSources();
  memory_.counters->offloads.fetch_add(1, std::memory_order_relaxed);
  memory_.counters->offloaded_bytes.fetch_add(bytes, std::memory_order_relaxed);
  FinishPublication(std::move(replaced));
  return bytes;
}

// Write order: state, lane words, version. A reader that finds a lane word cleared therefore knows,
// or learns when it looks again, that the tail is closed and where the rows are.
void Sequence::Withdraw(const Offloading& work, Replaced& replaced) {
  block().state.store(shm::kSequenceOffloaded);
  offloaded_ = true;
  for (std::uint32_t i = 0; i < lanes_.size(); ++i) {
    Lane& lane = lanes_[i];
    lane_words()[i].store(0);
    if (lane.snapshot.valid()) replaced.blocks.push_back(std::move(lane.snapshot));
    for (HeldSegment& held : lane.segments) {
      std::shared_ptr<Segment> stored = work.Find(*held.segment);
      // A fork in the meantime shares it, so it remains in the pool. Two references are expected:
      // the lane's and this operation's.
      if (stored == nullptr || held.segment.use_count() > 2) continue;
      replaced.segments.push_back(std::exchange(held.segment, std::move(stored)));
    }
  }
}

absl::StatusOr<Residence> Sequence::Restore() {
  const Clock::TimePoint begun = memory_.clock->Now();
  Restoring work(memory_);
  Replaced replaced;  // tier memory is freed after the lock
  {
    MutexLock lock(mutex_);
    while (moving_) moving_done_.Wait(mutex_);
    if (freed_) return Usable();
    if (!offloaded_) {
      ++residents_;
      Used();
      return Residence(shared_from_this());
    }
    for (const Lane& lane : lanes_) work.Take(lane);
    moving_ = true;
  }
  absl::Status status = Transfer([&work] { return work.Run(); });
  MutexLock lock(mutex_);
  moving_ = false;
  moving_done_.NotifyAll();
  if (status.ok()) status = Usable();
  if (!status.ok()) return status;
  absl::StatusOr<std::vector<pool::Block>> snapshots = ReserveSnapshots(0);
  if (!snapshots.ok()) return snapshots.status();
  for (std::uint32_t i = 0; i < lanes_.size(); ++i) {
    for (HeldSegment& held : lanes_[i].segments) {
      std::shared_ptr<Segment> resident = work.Find(*held.segment);
      if (resident == nullptr) continue;
      replaced.segments.push_back(std::exchange(held.segment, std::move(resident)));
    }
    PublishLane(i, std::move((*snapshots)[i]), replaced);
  }
  offloaded_ = false;
  ++residents_;
  Used();
  memory_.counters->restores.fetch_add(1, std::memory_order_relaxed);
  memory_.counters->restored_bytes.fetch_add(work.bytes(), std::memory_order_relaxed);
  memory_.counters->restore_times.Observe(memory_.clock->Now() - begun);
  FinishPublication({});
  // Written after the lane words and the version, so a reader that sees "live" sees all of it.
  block().state.store(shm::kSequenceLive);
  return Residence(shared_from_this());
}

Clock::TimePoint Sequence::LastUseLocked() {
  if (const std::shared_ptr<const TailHandle> tail = this->tail()) {
    const std::uint64_t committed = tail->CommittedTokens().value_or(0);
    if (std::exchange(seen_committed_, committed) != committed) Used();
  }
  return last_use_;
}

Sequence::Rest Sequence::GetIdleState() {
  if (!mutex_.TryLock()) return {.last_use = memory_.clock->Now(), .at_work = true};
  const Rest rest = IdleStateLocked();
  mutex_.Unlock();
  return rest;
}

Sequence::Rest Sequence::IdleStateLocked() {
  const Clock::TimePoint last_use = LastUseLocked();
  const auto its_own = [](const HeldSegment& held) {
    return held.segment.use_count() == 1 && held.segment->tile_bytes() > 0;
  };
  // One match is enough: the caller does not need the size, and there may be thousands of
  // sequences.
  const bool any = std::any_of(lanes_.begin(), lanes_.end(), [&](const Lane& lane) {
    return std::any_of(lane.segments.begin(), lane.segments.end(), its_own);
  });
  const absl::Status may = MayOffload();
  return {.last_use = last_use, .may_go = any && may.ok(), .at_work = any && absl::IsAborted(may)};
}

}  // namespace tessera::cache
