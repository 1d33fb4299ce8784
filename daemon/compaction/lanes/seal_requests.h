// The seals of a lane that are requested, running, or deferred for lack of memory.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>

#include "daemon/base/mutex.h"

namespace tessera::compaction {

// What a seal does with the rows that wait for a strategy. Whole segments of the policy's length
// are always sealed; the remainder is kept dense unless a field covers it.
struct SealRequest {
  // All tokens before this one are sealed: a prompt ended here, or Compress was called.
  std::uint64_t all_before = 0;
  // After all_before, full tiles before this token are sealed if they are long enough for a
  // segment: tokens had been decoded up to here.
  std::uint64_t decoded_before = 0;

  void Join(const SealRequest& other) {
    all_before = std::max(all_before, other.all_before);
    decoded_before = std::max(decoded_before, other.decoded_before);
  }
  void CutTo(std::uint64_t tokens) {
    all_before = std::min(all_before, tokens);
    decoded_before = std::min(decoded_before, tokens);
  }
  static constexpr SealRequest Everything() { return {.all_before = ~std::uint64_t{0}}; }

  friend bool operator==(const SealRequest&, const SealRequest&) = default;
};

// The seal requests of one lane. Thread-safe.
//
// A request is always in exactly one state (wanted, running, stalled) until it is carried out,
// because a fork copies all of them. Requests with a waiter are listed separately until the waiter
// is answered. No request is stored elsewhere, so CutTo reaches all of them.
class SealRequests {
 public:
  // Identifies a request with a waiter; 0: no waiter.
  using Told = std::uint64_t;

  // Adds a request. Requests that wait are merged. True if none was waiting before.
  bool Want(const SealRequest& wish) {
    MutexLock lock(mutex_);
    const bool first = !wanted_.has_value();
    Add(wish, wanted_);
    return Note(first);
  }
  // Called by a running job that continues in another one: requests again what is running. One
  // atomic step, so that a cut in between is not missed.
  void RequeueRunning() {
    MutexLock lock(mutex_);
    Add(running_.value_or(SealRequest()), wanted_);
    Note();
  }
  bool wanted() const { return any_wanted_.load(); }
  // Whether a request waits or runs.
  bool in_hand() const {
    MutexLock lock(mutex_);
    return wanted_.has_value() || jobs_ != 0;
  }

  Told Tell(const SealRequest& wish) {
    MutexLock lock(mutex_);
    told_[++last_told_] = wish;
    return last_told_;
  }
  void Forget(Told told) {
    MutexLock lock(mutex_);
    told_.erase(told);
  }

  // Called by a job, with its own waiter's request. False: another job has taken the requests.
  // Otherwise the job must call End.
  bool Begin(Told told) {
    MutexLock lock(mutex_);
    const auto own = told_.find(told);
    if (!wanted_.has_value() && own == told_.end()) return false;
    if (own != told_.end()) Add(own->second, running_);
    Move(wanted_, running_);
    ++jobs_;
    return Note(true);
  }
  // Called by a running job: it also carries out the stalled requests.
  void AdoptDeferred() {
    MutexLock lock(mutex_);
    Move(stalled_, running_);
    Note();
  }
  // What running jobs have to do. Read it again after the work, since it may have been cut.
  SealRequest running() const {
    MutexLock lock(mutex_);
    return running_.value_or(SealRequest());
  }
  // Called by a running job that could not be carried out.
  void Stall() {
    MutexLock lock(mutex_);
    if (running_.has_value()) Add(*running_, stalled_);
    Note();
  }
  void End() {
    MutexLock lock(mutex_);
    if (--jobs_ == 0) running_.reset();
  }

  bool stalled() const { return any_stalled_.load(); }
  // Requests the stalled seals again. False if there are none.
  bool RequeueDeferred() {
    if (!stalled()) return false;
    MutexLock lock(mutex_);
    const bool any = stalled_.has_value();
    Move(stalled_, wanted_);
    return Note(any);
  }

  // All requests merged, for a fork that shares the lane's rows.
  std::optional<SealRequest> Ahead() const {
    MutexLock lock(mutex_);
    std::optional<SealRequest> ahead;
    for (const std::optional<SealRequest>* wish : {&wanted_, &running_, &stalled_}) {
      if (wish->has_value()) Add(**wish, ahead);
    }
    return ahead;
  }
  // The lane was truncated to `tokens`.
  void CutTo(std::uint64_t tokens) {
    MutexLock lock(mutex_);
    for (std::optional<SealRequest>* wish : {&wanted_, &running_, &stalled_}) {
      if (wish->has_value()) (*wish)->CutTo(tokens);
    }
    for (auto& [told, wish] : told_) wish.CutTo(tokens);
  }

 private:
  static void Add(const SealRequest& wish, std::optional<SealRequest>& to) {
    if (!to.has_value()) to.emplace();
    to->Join(wish);
  }
  static void Move(std::optional<SealRequest>& from, std::optional<SealRequest>& to) {
    if (from.has_value()) Add(*std::exchange(from, std::nullopt), to);
  }
  bool Note(bool result = true) TESSERA_REQUIRES(mutex_) {
    any_wanted_.store(wanted_.has_value());
    any_stalled_.store(stalled_.has_value());
    return result;
  }

  mutable Mutex mutex_;
  std::optional<SealRequest> wanted_ TESSERA_GUARDED_BY(mutex_);
  std::optional<SealRequest> running_ TESSERA_GUARDED_BY(mutex_);
  std::optional<SealRequest> stalled_ TESSERA_GUARDED_BY(mutex_);
  std::map<Told, SealRequest> told_ TESSERA_GUARDED_BY(mutex_);
  Told last_told_ TESSERA_GUARDED_BY(mutex_) = 0;
  std::uint32_t jobs_ TESSERA_GUARDED_BY(mutex_) = 0;
  // Mirrors for callers that poll every lane of a sequence for each token.
  std::atomic<bool> any_wanted_{false};
  std::atomic<bool> any_stalled_{false};
};

}  // namespace tessera::compaction
