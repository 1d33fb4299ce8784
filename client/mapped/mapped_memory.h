// Everything a session has mapped, behind one gate: read-only extents, control page, tails,
// staging, and the reader slots with the steps that use them.
//
// Close unmaps everything at once. A call holds the gate while it touches mapped memory, and not
// while it waits for an RPC, ring space or a place in the staging arena.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/statusor.h"
#include "client/gpu/gpu.h"
#include "client/mapped/descriptors.h"
#include "client/mapped/extents.h"
#include "client/mapped/gate.h"
#include "client/mapped/mapping.h"
#include "client/mapped/staging.h"
#include "client/mapped/tails.h"
#include "daemon/base/mutex.h"
#include "daemon/platform/memfd.h"
#include "proto/shm/layout.h"

namespace tessera::client {

// State that a reader slot keeps from one step to the next.
class SlotState {
 public:
  virtual ~SlotState() = default;
};

class MappedMemory {
 public:
  struct Options {
    std::unique_ptr<DescriptorSource> source;
    std::unique_ptr<Gpu> gpu;  // null: all memory is host memory
    Extents::Expected expected;
    std::uint64_t staging_bytes;
  };
  static absl::StatusOr<std::unique_ptr<MappedMemory>> Open(Options options);
  ~MappedMemory();

  Gate& gate() { return gate_; }
  Extents& extents() { return *extents_; }
  Tails& tails() { return *tails_; }
  shm::ControlPage& control() { return *control_; }
  DescriptorSource& source() { return *source_; }
  Gpu* gpu() { return gpu_.get(); }

  // Takes a free reader slot; RESOURCE_EXHAUSTED if all are taken. Return it with ReturnSlot.
  absl::StatusOr<std::uint32_t> TakeSlot();
  void ReturnSlot(std::uint32_t slot);
  // Belongs to the holder of the slot; null until it is set.
  std::unique_ptr<SlotState>& StateOf(std::uint32_t slot) { return slot_states_[slot]; }

  // The staging arena, fetched on first use. NOT_FOUND or RESOURCE_EXHAUSTED if the daemon has none
  // to give: tensors then travel inside messages.
  absl::StatusOr<StagingRing*> staging();
  struct StagingCopy {
    std::uint64_t to;  // offset in the arena
    const std::byte* from;
    std::uint64_t bytes;
  };
  // Inside the gate. On a GPU `from` may be host or device memory.
  absl::Status CopyToStaging(std::span<const StagingCopy> copies);

  // Unmaps pool extents that the daemon has removed. On the lease thread.
  void UnmapRemovedExtents();
  // Refuses later calls, waits for those inside, and unmaps everything. On the lease thread;
  // idempotent.
  void Close();

 private:
  explicit MappedMemory(Options& options);
  absl::Status MapControl();

  Gate gate_;
  const std::unique_ptr<DescriptorSource> source_;
  const std::unique_ptr<Gpu> gpu_;  // outlives the mappings and the steps' scratch
  std::unique_ptr<Extents> extents_;
  AddressRange control_memory_;
  shm::ControlPage* control_ = nullptr;
  std::unique_ptr<Tails> tails_;

  Mutex staging_mutex_;
  std::uint64_t staging_bytes_ = 0;
  bool staging_closed_ TESSERA_GUARDED_BY(staging_mutex_) = false;
  absl::Status staging_refused_ TESSERA_GUARDED_BY(staging_mutex_);
  std::unique_ptr<StagingRing> staging_ring_ TESSERA_GUARDED_BY(staging_mutex_);
  Mapping staging_memory_;  // set once, before the first place is taken
  Mutex copy_mutex_;
  std::unique_ptr<kernels::cuda::Queue> copies_ TESSERA_GUARDED_BY(copy_mutex_);

  std::atomic<std::uint64_t> taken_slots_{0};  // bit s: reader slot s is in use
  std::array<std::unique_ptr<SlotState>, shm::kReaderSlots> slot_states_;
};

}  // namespace tessera::client
