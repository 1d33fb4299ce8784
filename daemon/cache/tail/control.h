// A session's control page, from the daemon's side: the worker writes it, so every word that is
// read here is copied once and judged by its caller.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/base/mutex.h"
#include "daemon/platform/event_loop.h"
#include "daemon/platform/memfd.h"
#include "daemon/pool/epochs.h"
#include "proto/shm/layout.h"

namespace tessera::cache {

class Control;

// The place of one committed count, held by one tail. Given back by the destructor: never before
// the last reader of that tail has gone, so that nobody takes another sequence's count for its own.
class CommitSlot {
 public:
  CommitSlot() = default;
  CommitSlot(CommitSlot&& other) noexcept
      : control_(std::exchange(other.control_, nullptr)), index_(other.index_) {}
  CommitSlot& operator=(CommitSlot&& other) noexcept;
  CommitSlot(const CommitSlot&) = delete;
  CommitSlot& operator=(const CommitSlot&) = delete;
  ~CommitSlot() { Reset(); }

  std::uint32_t index() const { return index_; }
  // The worker's word, as it is now.
  std::uint64_t Load() const;
  // A number for the tail that takes it: above `last` and all that tails here had before, and not 0
  // in its low 16 bits, so that what a late step says of another tail is not taken for this one's.
  std::uint32_t NextGeneration(std::uint32_t last) const;
  // Whether one of its worker's reader slots is pinned now.
  bool WorkerPins() const;

 private:
  friend class Control;
  CommitSlot(std::shared_ptr<Control> control, std::uint32_t index)
      : control_(std::move(control)), index_(index) {}
  void Reset();
  std::shared_ptr<Control> control_;
  std::uint32_t index_ = 0;
};

// Thread-safe.
class Control : public std::enable_shared_from_this<Control> {
 public:
  static absl::StatusOr<std::shared_ptr<Control>> Create();

  shm::ControlPage& page() const { return *page_; }
  const Memfd& memory() const { return memory_; }
  const Event& wake_event() const { return wake_event_; }
  // The reader slots, kept mapped by the returned pointer.
  static std::shared_ptr<pool::PinSource> Pins(const std::shared_ptr<Control>& control);

  // A free slot; its word reads "nothing committed". RESOURCE_EXHAUSTED beyond kCommitSlots.
  absl::StatusOr<CommitSlot> TakeCommitSlot();
  // The daemon is about to sleep: the next full tile shall signal wake_event.
  // An exchange, not a store: it reads what a worker's own exchange left, and so sees every commit
  // that was made before it.
  void AskForWake() { page_->wake.exchange(1, std::memory_order_seq_cst); }
  void CancelWake() { page_->wake.store(0, std::memory_order_seq_cst); }

 private:
  friend class CommitSlot;
  Control(Memfd memory, AddressRange mapping, Event wake_event);

  Memfd memory_;
  AddressRange mapping_;
  Event wake_event_;
  shm::ControlPage* page_;
  Mutex mutex_;
  std::vector<std::uint32_t> free_slots_ TESSERA_GUARDED_BY(mutex_);
  std::uint32_t next_slot_ TESSERA_GUARDED_BY(mutex_) = 0;
  std::vector<std::uint32_t> generations_ TESSERA_GUARDED_BY(mutex_);  // by slot: its last tail's
};

}  // namespace tessera::cache
