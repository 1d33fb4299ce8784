// The control page of a session, seen from the daemon. The worker writes it, so the daemon copies
// every word once, and the caller validates the copy.
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

// The slot for the committed count of one tail. The destructor releases it, but only after the last
// reader of that tail has finished; otherwise a reader could mistake another sequence's count for
// this one's.
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
  // The current value of the worker's word.
  std::uint64_t Load() const;
  // A generation number for a new tail in this slot: greater than `last` and than all earlier
  // generations of this slot, with nonzero low 16 bits. A late step of an earlier tail is therefore
  // never attributed to the new one.
  std::uint32_t NextGeneration(std::uint32_t last) const;
  // True if the worker currently pins one of its reader slots.
  bool WorkerPins() const;

 private:
  friend class Control;
  CommitSlot(std::shared_ptr<Control> control, std::uint32_t index)
      : control_(std::move(control)), index_(index) {}
  void Reset();
  std::shared_ptr<Control> control_;
  std::uint32_t index_ = 0;
};

// Owns the control page of one session. Thread-safe.
class Control : public std::enable_shared_from_this<Control> {
 public:
  static absl::StatusOr<std::shared_ptr<Control>> Create();

  shm::ControlPage& page() const { return *page_; }
  const Memfd& memory() const { return memory_; }
  const Event& wake_event() const { return wake_event_; }
  // The reader slots. The returned pointer keeps them mapped.
  static std::shared_ptr<pool::PinSource> Pins(const std::shared_ptr<Control>& control);

  // Takes a free slot whose word reads "nothing committed". Returns RESOURCE_EXHAUSTED beyond
  // kCommitSlots.
  absl::StatusOr<CommitSlot> TakeCommitSlot();
  // Asks the worker to signal wake_event at its next full tile, because the daemon is about to
  // sleep. An exchange rather than a store: it synchronizes with the worker's own exchange and so
  // sees every commit made before it.
  void RequestWake() { page_->wake.exchange(1, std::memory_order_seq_cst); }
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
  std::vector<std::uint32_t> generations_ TESSERA_GUARDED_BY(mutex_);  // by slot: of the last tail
};

}  // namespace tessera::cache
