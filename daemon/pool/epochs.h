// `Epochs` decides when memory that readers may still use is freed.
//
// Readers pin the tenant's epoch, a word in mapped memory (proto/shm/pin.h). Retire advances the
// epoch and records the readers pinned before it; the retired batch is destroyed when the last of
// them has moved on. A reader pinned longer than the limit is revoked: its unpin fails, its result
// is discarded, and it no longer delays any batch.
//
// Invariants:
// - A batch's set of blockers only shrinks: a slot that has moved on cannot block it again,
// whatever
//   a worker writes there. A batch therefore waits at most for the longest limit of its readers
//   after it was retired.
// - Garbage is destroyed outside the lock, in any order.
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

// The reader slots of one session, or the daemon's own. The words remain mapped while the source
// lives.
struct PinSource {
  shm::ReaderSlot* slots = nullptr;
  std::uint32_t count = 0;
  bool revocable = true;                   // false for the daemon's own readers, which never hang
  std::optional<Clock::Duration> limit{};  // instead of Options::pin_limit
};

class Epochs {
 public:
  // What to destroy: usually a closure that owns Blocks and references to segments.
  using Garbage = absl::AnyInvocable<void() &&>;

  struct Options {
    shm::Word* epoch;
    const Clock* clock;
    Clock::Duration pin_limit;  // of sources without a limit of their own
    // Called outside the lock when the first batch starts to wait, so that the owner of the timer
    // calls Collect.
    std::function<void()> on_waiting;
  };
  explicit Epochs(Options options) : options_(std::move(options)) {}
  ~Epochs();

  const shm::Word& epoch() const { return *options_.epoch; }

  void AddSource(std::shared_ptr<PinSource> source);
  // Pins of this source no longer count.
  void RemoveSource(const PinSource* source);

  // Destroys `garbage`, which was published before this call but no longer is, once its readers are
  // done. `bytes` is for the metrics.
  void Retire(Garbage garbage, std::uint64_t bytes);

  // Frees what can be freed and revokes overdue pins. Returns the time until the next useful call;
  // nullopt if nothing waits.
  std::optional<Clock::Duration> Collect();

  std::uint64_t waiting_bytes() const { return waiting_bytes_.load(std::memory_order_relaxed); }
  std::uint64_t revoked() const { return revoked_.load(std::memory_order_relaxed); }
  // Number of slots of a source that are pinned right now.
  static std::uint32_t Pinned(const PinSource& source);

 private:
  struct Blocker {
    std::shared_ptr<PinSource> source;
    std::uint32_t slot;
    std::uint64_t word;  // the slot blocks while it holds exactly this value
  };
  struct Batch {
    Garbage garbage;
    std::uint64_t bytes;
    Clock::TimePoint retired;
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
