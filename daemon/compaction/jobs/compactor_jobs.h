// Helpers shared by the compactor's source files: job batches, tickets and turns.
#pragma once

#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "daemon/base/ids.h"
#include "daemon/base/strings.h"
#include "daemon/compaction/jobs/compactor.h"
#include "daemon/policies/token_policy.h"

namespace tessera::compaction {

namespace internal {

// Attempts per lane, which fail if the lane is forked or truncated meanwhile.
inline constexpr int kAttempts = 3;

inline absl::Status MovedPositions(const cache::Sequence& sequence) {
  return absl::FailedPreconditionError(
      Concat("entries of ", sequence.id().ToString(), " were moved to other positions, by ",
             sequence.position_shift(),
             " at the end; set a policy with key_space=pre before any entry is moved"));
}

// The answer to callers that asked under an earlier policy of the sequence.
inline absl::Status PolicyChanged(const cache::Sequence& sequence) {
  return absl::AbortedError(
      Concat("the policy of ", sequence.id().ToString(), " has changed; retry"));
}

inline TenantId TenantOf(const cache::Sequence& sequence) {
  return TenantId(sequence.id().value() >> 48);
}

}  // namespace internal

// The jobs that a caller of Compress waits for. Calls `done` when the last job releases it.
class Compactor::Batch {
 public:
  Batch(Done done, const Rows& rows)
      : all_shown_(rows.all_shown), amid_steps_(rows.amid_steps), done_(std::move(done)) {}
  ~Batch() {
    tail_blocks_.reset();  // before the waiter continues
    std::move(done_)(status_);
  }
  bool all_shown() const { return all_shown_; }    // Rows::all_shown
  bool amid_steps() const { return amid_steps_; }  // Rows::amid_steps
  // Keeps tails closed until all jobs are done.
  void Hold(cache::Sequence::TailBlock shut) { tail_blocks_ = std::move(shut); }
  void Report(const absl::Status& status) {
    MutexLock lock(mutex_);
    // An error in another layer takes precedence over a prompt that is too short.
    const bool answered = policies::LeavesWhole(status_) && !policies::LeavesWhole(status);
    if (status_.ok() || (answered && !status.ok())) status_ = status;
  }

 private:
  const bool all_shown_;
  const bool amid_steps_;
  Mutex mutex_;
  absl::Status status_;  // read without the mutex in the destructor, which is exclusive
  cache::Sequence::TailBlock tail_blocks_;
  Done done_;
};

// A job's membership in a batch; null: in none. A job that is dropped without running reports
// CANCELLED.
class Compactor::Ticket {
 public:
  explicit Ticket(std::shared_ptr<Batch> batch) : batch_(std::move(batch)) {}
  Ticket(Ticket&&) = default;
  Ticket& operator=(Ticket&&) = delete;
  ~Ticket() {
    if (batch_ == nullptr) return;
    batch_->Report(absl::CancelledError(
        "the sequence was freed, or the daemon stopped, before all of it was compressed"));
  }

  bool waited_for() const { return batch_ != nullptr; }
  bool all_shown() const { return waited_for() && batch_->all_shown(); }
  bool amid_steps() const { return !waited_for() || batch_->amid_steps(); }
  void Report(const absl::Status& status) { batch_->Report(status); }
  // The work is done, or its failure has been reported.
  void Finish() { batch_ = nullptr; }

 private:
  std::shared_ptr<Batch> batch_;
};

// Exists while a seal runs. If the seal is a retry from the queue of deferred seals, its destructor
// queues the next one, unless this one was deferred again.
class Compactor::Turn {
 public:
  Turn(Compactor& compactor, TenantId tenant, bool again)
      : compactor_(compactor), tenant_(tenant), again_(again) {}
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  ~Turn() {
    if (!again_) return;
    compactor_.QueueDeferred(compactor_.stalled_.Next(tenant_, found_));
  }
  bool again() const { return again_; }
  // Another job continues the seal and takes over this turn.
  void PassOn() { again_ = false; }
  // The seal has found memory.
  void Found() { found_ = true; }
  // Defers the seal, at the end of the queue.
  void Stall(DeferredSeals::Item item) {
    const Clock::TimePoint now = compactor_.options_.clock->Now();
    bool look = true;
    if (std::exchange(again_, false)) {
      compactor_.stalled_.Return(std::move(item), now);
    } else {
      look = compactor_.stalled_.Join(std::move(item), now);
    }
    if (look && compactor_.options_.on_attention) compactor_.options_.on_attention();
  }

 private:
  Compactor& compactor_;
  const TenantId tenant_;
  bool again_;
  bool found_ = false;
};

}  // namespace tessera::compaction
