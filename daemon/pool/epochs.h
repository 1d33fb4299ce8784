// When memory that readers may still look at is really freed.
//
// The tenant's epoch is a word that readers pin (proto/shm/pin.h). Retire advances it and notes the
// readers that were pinned before; what was retired is destroyed when the last of them has moved
// on. A reader that stays pinned beyond the limit is revoked: its unpin fails, its result is
// discarded, and it delays nobody any longer.
//
// Invariants:
//   a batch's blockers only ever become fewer: a slot that moved on cannot block it again, whatever
//   a worker writes there; so a batch waits at most `pin_limit` after it was retired
//   garbage is destroyed outside the lock, in any order
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "daemon/base/clock.h"
#include "daemon/base/mutex.h"
#include "proto/shm/pin.h"

namespace tessera::pool {

// A set of reader slots: one session's, or the daemon's own. The words stay mapped while the
// source is alive.
struct PinSource {
  shm::ReaderSlot* slots = nullptr;
  std::uint32_t count = 0;
  bool revocable = true;  // the daemon's own readers never hang, and are never revoked
};

class Epochs {
 public:
  // What is to be destroyed: usually a closure that owns Blocks and segment references.
  using Garbage = absl::AnyInvocable<void() &&>;

  struct Options {
    shm::Word* epoch;
    const Clock* clock;
    Clock::Duration pin_limit;
    // Called, outside the lock, when something starts to wait and nothing did: whoever calls
    // Collect on a timer learns that there is a reason to.
    std::function<void()> on_waiting;
  };
  explicit Epochs(Options options) : options_(std::move(options)) {}
  ~Epochs();

  const shm::Word& epoch() const { return *options_.epoch; }

  void AddSource(std::shared_ptr<PinSource> source);
  // The source's pins count no more, from now on.
  void RemoveSource(const PinSource* source);

  // Everything published before this call that no longer is. `bytes` is for the metrics.
  void Retire(Garbage garbage, std::uint64_t bytes);

  // Frees what can be freed and revokes what is overdue. Returns how long until it is worth another
  // look, or nothing while nothing waits.
  std::optional<Clock::Duration> Collect();

  std::uint64_t waiting_bytes() const { return waiting_bytes_.load(std::memory_order_relaxed); }
  std::uint64_t revoked() const { return revoked_.load(std::memory_order_relaxed); }
  // Slots that are pinned right now, of one source.
  static std::uint32_t Pinned(const PinSource& source);

 private:
  struct Blocker {
    std::shared_ptr<PinSource> source;
    std::uint32_t slot;
    std::uint64_t word;  // while the slot holds exactly this, it blocks
  };
  struct Batch {
    Garbage garbage;
    std::uint64_t bytes;
    Clock::TimePoint deadline;
    std::vector<Blocker> blockers;
  };

  std::vector<Blocker> BlockersOf(std::uint64_t epoch) TESSERA_REQUIRES(mutex_);
  void Thin(Batch& batch, Clock::TimePoint now) TESSERA_REQUIRES(mutex_);

  const Options options_;
  mutable Mutex mutex_;
  std::vector<std::shared_ptr<PinSource>> sources_ TESSERA_GUARDED_BY(mutex_);
  std::list<Batch> waiting_ TESSERA_GUARDED_BY(mutex_);
  std::atomic<std::uint64_t> waiting_bytes_{0};
  std::atomic<std::uint64_t> revoked_{0};
};

}  // namespace tessera::pool
