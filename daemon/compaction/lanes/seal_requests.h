// Which seals of a lane wait, run, or could not be carried out.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>

#include "daemon/base/mutex.h"

namespace tessera::compaction {

// What a seal is to do with the rows that wait. Whole segments of the policy's length are sealed in
// any case; what is left over stays plain.
struct SealWish {
  // Of tokens before this one nothing is left over: a prompt has come to its end there, or somebody
  // asks.
  std::uint64_t all_before = 0;
  // Of those that come behind, full tiles before this one are sealed where they are long enough for
  // a segment: so much had been decoded.
  std::uint64_t decoded_before = 0;

  void Join(const SealWish& other) {
    all_before = std::max(all_before, other.all_before);
    decoded_before = std::max(decoded_before, other.decoded_before);
  }
  void CutTo(std::uint64_t tokens) {
    all_before = std::min(all_before, tokens);
    decoded_before = std::min(decoded_before, tokens);
  }
  static constexpr SealWish Everything() { return {.all_before = ~std::uint64_t{0}}; }

  friend bool operator==(const SealWish&, const SealWish&) = default;
};

// Thread-safe. A wish is in one of its three places until it is carried out, and never in none: a
// fork asks for all of them. What somebody waits for stands here beside that until he is told.
// Nobody keeps one elsewhere, so that all are cut where the lane is.
class SealWishes {
 public:
  // Of what somebody waits for; 0: nobody does.
  using Told = std::uint64_t;

  // True where none was wanted before. Wishes that wait become one.
  bool Want(const SealWish& wish) {
    MutexLock lock(mutex_);
    const bool first = !wanted_.has_value();
    Add(wish, wanted_);
    return Note(first);
  }
  // By a job that has begun: what it does goes on in another one. At once, for a cut between asking
  // for it and wanting it would be missed.
  void WantRunning() {
    MutexLock lock(mutex_);
    Add(running_.value_or(SealWish()), wanted_);
    Note();
  }
  bool wanted() const { return any_wanted_.load(); }
  // Wanted, or a job has begun.
  bool in_hand() const {
    MutexLock lock(mutex_);
    return wanted_.has_value() || jobs_ != 0;
  }

  Told Tell(const SealWish& wish) {
    MutexLock lock(mutex_);
    told_[++last_told_] = wish;
    return last_told_;
  }
  void Forget(Told told) {
    MutexLock lock(mutex_);
    told_.erase(told);
  }

  // By a job, with what it was told itself. False: another one has taken on what was wanted. Else
  // it ends by End.
  bool Begin(Told told) {
    MutexLock lock(mutex_);
    const auto own = told_.find(told);
    if (!wanted_.has_value() && own == told_.end()) return false;
    if (own != told_.end()) Add(own->second, running_);
    Move(wanted_, running_);
    ++jobs_;
    return Note(true);
  }
  // By a job that has begun: what could not be carried out before is part of it.
  void TakeOnStalled() {
    MutexLock lock(mutex_);
    Move(stalled_, running_);
    Note();
  }
  // What jobs that have begun are to do; asked for when it is done, for it may be cut meanwhile.
  SealWish running() const {
    MutexLock lock(mutex_);
    return running_.value_or(SealWish());
  }
  // By a job that has begun: it could not be carried out.
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
  // What could not be carried out is wanted again. False: there is nothing of the kind.
  bool WantStalled() {
    if (!stalled()) return false;
    MutexLock lock(mutex_);
    const bool any = stalled_.has_value();
    Move(stalled_, wanted_);
    return Note(any);
  }

  // All of them together; for whoever shares the lane's rows.
  std::optional<SealWish> Ahead() const {
    MutexLock lock(mutex_);
    std::optional<SealWish> ahead;
    for (const std::optional<SealWish>* wish : {&wanted_, &running_, &stalled_}) {
      if (wish->has_value()) Add(**wish, ahead);
    }
    return ahead;
  }
  // The lane was.
  void CutTo(std::uint64_t tokens) {
    MutexLock lock(mutex_);
    for (std::optional<SealWish>* wish : {&wanted_, &running_, &stalled_}) {
      if (wish->has_value()) (*wish)->CutTo(tokens);
    }
    for (auto& [told, wish] : told_) wish.CutTo(tokens);
  }

 private:
  static void Add(const SealWish& wish, std::optional<SealWish>& to) {
    if (!to.has_value()) to.emplace();
    to->Join(wish);
  }
  static void Move(std::optional<SealWish>& from, std::optional<SealWish>& to) {
    if (from.has_value()) Add(*std::exchange(from, std::nullopt), to);
  }
  bool Note(bool result = true) TESSERA_REQUIRES(mutex_) {
    any_wanted_.store(wanted_.has_value());
    any_stalled_.store(stalled_.has_value());
    return result;
  }

  mutable Mutex mutex_;
  std::optional<SealWish> wanted_ TESSERA_GUARDED_BY(mutex_);
  std::optional<SealWish> running_ TESSERA_GUARDED_BY(mutex_);
  std::optional<SealWish> stalled_ TESSERA_GUARDED_BY(mutex_);
  std::map<Told, SealWish> told_ TESSERA_GUARDED_BY(mutex_);
  Told last_told_ TESSERA_GUARDED_BY(mutex_) = 0;
  std::uint32_t jobs_ TESSERA_GUARDED_BY(mutex_) = 0;
  // For who looks at every lane of a sequence, token by token.
  std::atomic<bool> any_wanted_{false};
  std::atomic<bool> any_stalled_{false};
};

}  // namespace tessera::compaction
