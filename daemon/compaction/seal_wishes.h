// Which seals of a lane wait, run, or could not be carried out.
#pragma once

#include <algorithm>
#include <cstdint>
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
  // Of what comes behind, full tiles are sealed where they are long enough for a segment.
  bool decoded = false;

  void Join(const SealWish& other) {
    all_before = std::max(all_before, other.all_before);
    decoded |= other.decoded;
  }
  void CutTo(std::uint64_t tokens) { all_before = std::min(all_before, tokens); }
  static constexpr SealWish Everything() { return {.all_before = ~std::uint64_t{0}}; }

  friend bool operator==(const SealWish&, const SealWish&) = default;
};

// Thread-safe. A wish is in one of its three places until it is carried out, and never in none: a
// fork asks for all of them.
class SealWishes {
 public:
  // True where none was wanted before. Wishes that wait become one.
  bool Want(const SealWish& wish) {
    MutexLock lock(mutex_);
    return Add(wish, wanted_);
  }
  bool wanted() const {
    MutexLock lock(mutex_);
    return wanted_.has_value();
  }

  // By a job, which is one of several: what it is to do, with what it was told itself. Nothing:
  // another one has taken it on. Else the job ends by End.
  std::optional<SealWish> Begin(const std::optional<SealWish>& told) {
    MutexLock lock(mutex_);
    std::optional<SealWish> wish = std::exchange(wanted_, std::nullopt);
    if (told.has_value()) Add(*told, wish);
    if (!wish.has_value()) return std::nullopt;
    ++jobs_;
    Add(*wish, running_);
    return wish;
  }
  // By a job that has begun with `wish`: what could not be carried out before is part of it.
  SealWish WithStalled(SealWish wish) {
    MutexLock lock(mutex_);
    if (stalled_.has_value()) {
      wish.Join(*stalled_);
      Add(*std::exchange(stalled_, std::nullopt), running_);
    }
    return wish;
  }
  void End() {
    MutexLock lock(mutex_);
    if (--jobs_ == 0) running_.reset();
  }

  // It could not be carried out.
  void Stall(const SealWish& wish) {
    MutexLock lock(mutex_);
    Add(wish, stalled_);
  }
  bool stalled() const {
    MutexLock lock(mutex_);
    return stalled_.has_value();
  }
  // What could not be carried out is wanted again. False: there is nothing of the kind.
  bool WantStalled() {
    MutexLock lock(mutex_);
    if (!stalled_.has_value()) return false;
    Add(*std::exchange(stalled_, std::nullopt), wanted_);
    return true;
  }

  // All of them together; for whoever shares the lane's rows.
  std::optional<SealWish> Ahead() const {
    MutexLock lock(mutex_);
    std::optional<SealWish> ahead = wanted_;
    if (running_.has_value()) Add(*running_, ahead);
    if (stalled_.has_value()) Add(*stalled_, ahead);
    return ahead;
  }
  // The lane was cut. What a job has begun with it goes on with, on whatever it finds.
  void CutTo(std::uint64_t tokens) {
    MutexLock lock(mutex_);
    for (std::optional<SealWish>* wish : {&wanted_, &running_, &stalled_}) {
      if (wish->has_value()) (*wish)->CutTo(tokens);
    }
  }

 private:
  static bool Add(const SealWish& wish, std::optional<SealWish>& to) {
    const bool first = !to.has_value();
    if (first) to.emplace();
    to->Join(wish);
    return first;
  }

  mutable Mutex mutex_;
  std::optional<SealWish> wanted_ TESSERA_GUARDED_BY(mutex_);
  std::optional<SealWish> running_ TESSERA_GUARDED_BY(mutex_);
  std::optional<SealWish> stalled_ TESSERA_GUARDED_BY(mutex_);
  std::uint32_t jobs_ TESSERA_GUARDED_BY(mutex_) = 0;
};

}  // namespace tessera::compaction
