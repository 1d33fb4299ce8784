// What the compactor's own files share: jobs that somebody waits for.
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

// A lane that is forked or cut under the work is taken up again.
inline constexpr int kAttempts = 3;

inline absl::Status MovedPositions(const cache::Sequence& sequence) {
  return absl::FailedPreconditionError(
      Concat("entries of ", sequence.id().ToString(), " were moved to other positions, by ",
             sequence.position_shift(),
             " at the end; a policy that turns keys back begins before any is moved"));
}

// To whoever asked for something under a policy that is not the sequence's any more.
inline absl::Status PolicyChanged(const cache::Sequence& sequence) {
  return absl::AbortedError(
      Concat("the policy of ", sequence.id().ToString(), " has changed; ask again"));
}

inline TenantId TenantOf(const cache::Sequence& sequence) {
  return TenantId(sequence.id().value() >> 48);
}

}  // namespace internal

// Jobs that somebody waits for. The last to let go of it tells.
class Compactor::Batch {
 public:
  Batch(Done done, const Rows& rows)
      : all_shown_(rows.all_shown), amid_steps_(rows.amid_steps), done_(std::move(done)) {}
  ~Batch() {
    tail_blocks_.reset();  // before whoever waits goes on
    std::move(done_)(status_);
  }
  bool all_shown() const { return all_shown_; }    // Rows::all_shown
  bool amid_steps() const { return amid_steps_; }  // Rows::amid_steps
  // Until all of its jobs are done.
  void Hold(cache::Sequence::TailBlock shut) { tail_blocks_ = std::move(shut); }
  void Report(const absl::Status& status) {
    MutexLock lock(mutex_);
    // That a policy leaves a layer whole is an answer; what failed in another one is not.
    const bool answered = policies::LeavesWhole(status_) && !policies::LeavesWhole(status);
    if (status_.ok() || (answered && !status.ok())) status_ = status;
  }

 private:
  const bool all_shown_;
  const bool amid_steps_;
  Mutex mutex_;
  absl::Status status_;  // in the destructor nobody else has it
  cache::Sequence::TailBlock tail_blocks_;
  Done done_;
};

// A job's place in a batch, or in none. A job that is dropped without having run says so.
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
  // The work is done, or has failed as it was reported.
  void Finish() { batch_ = nullptr; }

 private:
  std::shared_ptr<Batch> batch_;
};

// While a seal runs: whether it came from the line of those that found no memory. At its end the
// next one of the line follows, unless it went back.
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
  // Another job goes on with it: that one answers.
  void PassOn() { again_ = false; }
  // There was memory for it.
  void Found() { found_ = true; }
  // To the end of the line.
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
