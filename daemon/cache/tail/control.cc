#include "daemon/cache/tail/control.h"

#include <algorithm>
#include <new>
#include <utility>

#include "daemon/base/error_cause.h"
#include "daemon/base/strings.h"

namespace tessera::cache {

absl::StatusOr<std::shared_ptr<Control>> Control::Create() {
  const std::uint64_t page = PageBytes();
  const std::uint64_t bytes = (sizeof(shm::ControlPage) + page - 1) / page * page;
  absl::StatusOr<Memfd> memory = Memfd::Create("tessera-control", bytes);
  if (!memory.ok()) return memory.status();
  if (absl::Status status = memory->Prefault(); !status.ok()) return status;
  if (absl::Status status = memory->Seal(SealFor::kWorkerWrites); !status.ok()) return status;
  absl::StatusOr<AddressRange> mapping = AddressRange::Map(memory->fd(), bytes, Access::kReadWrite);
  if (!mapping.ok()) return mapping.status();
  absl::StatusOr<Event> event = Event::Create();
  if (!event.ok()) return event.status();
  return std::shared_ptr<Control>(
      new Control(*std::move(memory), *std::move(mapping), *std::move(event)));
}

Control::Control(Memfd memory, AddressRange mapping, Event wake_event)
    : memory_(std::move(memory)),
      mapping_(std::move(mapping)),
      wake_event_(std::move(wake_event)),
      page_(new (mapping_.data()) shm::ControlPage) {
  page_->magic = shm::kControlMagic;
  page_->protocol_version = shm::kProtocolVersion;
  page_->layout_fingerprint = shm::kLayoutFingerprint;
  RequestWake();
}

CommitSlot& CommitSlot::operator=(CommitSlot&& other) noexcept {
  if (this != &other) {
    Reset();
    control_ = std::exchange(other.control_, nullptr);
    index_ = other.index_;
  }
  return *this;
}

std::uint64_t CommitSlot::Load() const {
  return control_->page_->commits[index_].load(std::memory_order_seq_cst);
}

std::uint32_t CommitSlot::NextGeneration(std::uint32_t last) const {
  MutexLock lock(control_->mutex_);
  std::uint32_t& generation = control_->generations_[index_];
  generation = std::max(generation, last) + 1;
  if ((generation & 0xffffu) == 0) ++generation;
  return generation;
}

bool CommitSlot::WorkerPins() const {
  return pool::Epochs::Pinned({.slots = control_->page_->readers, .count = shm::kReaderSlots}) > 0;
}

void CommitSlot::Reset() {
  if (control_ == nullptr) return;
  {
    MutexLock lock(control_->mutex_);
    control_->free_slots_.push_back(index_);
  }
  control_ = nullptr;
}

absl::StatusOr<CommitSlot> Control::TakeCommitSlot() {
  MutexLock lock(mutex_);
  std::uint32_t slot;
  if (!free_slots_.empty()) {
    slot = free_slots_.back();
    free_slots_.pop_back();
  } else if (next_slot_ < shm::kCommitSlots) {
    slot = next_slot_++;
    generations_.push_back(0);
  } else {
    return WithCause(absl::ResourceExhaustedError(Concat(
                         "the session already decodes ", next_slot_, " sequences; the limit is ",
                         shm::kCommitSlots, "; free some and retry, or use another session")),
                     ErrorCause::kQuota);
  }
  page_->commits[slot].store(0, std::memory_order_release);
  return CommitSlot(shared_from_this(), slot);
}

std::shared_ptr<pool::PinSource> Control::Pins(const std::shared_ptr<Control>& control) {
  struct Held {
    pool::PinSource pins;
    std::shared_ptr<Control> control;
  };
  auto held = std::make_shared<Held>();
  held->pins = {.slots = control->page_->readers, .count = shm::kReaderSlots};
  held->control = control;
  return {held, &held->pins};
}

}  // namespace tessera::cache
