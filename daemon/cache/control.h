// A session's control page, from the daemon's side: the worker writes it, so every word that is
// read here is copied once and judged by its caller.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "daemon/platform/event_loop.h"
#include "daemon/platform/memfd.h"
#include "daemon/pool/epochs.h"
#include "proto/shm/layout.h"

namespace tessera::cache {

class Control {
 public:
  static absl::StatusOr<std::shared_ptr<Control>> Create();

  shm::ControlPage& page() const { return *page_; }
  const Memfd& memory() const { return memory_; }
  const Event& wake_event() const { return wake_event_; }
  // The reader slots, kept mapped by the returned pointer.
  static std::shared_ptr<pool::PinSource> Pins(const std::shared_ptr<Control>& control);

  std::uint64_t CommitWord(std::uint32_t slot) const {
    return page_->commits[slot].load(std::memory_order_acquire);
  }
  // The daemon is about to sleep: the next full tile shall signal wake_event.
  void AskForWake() { page_->wake.store(1, std::memory_order_seq_cst); }
  void CancelWake() { page_->wake.store(0, std::memory_order_seq_cst); }

 private:
  Control(Memfd memory, AddressRange mapping, Event wake_event);

  Memfd memory_;
  AddressRange mapping_;
  Event wake_event_;
  shm::ControlPage* page_;
};

}  // namespace tessera::cache
