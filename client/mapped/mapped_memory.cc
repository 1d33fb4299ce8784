#include "client/mapped/mapped_memory.h"

#include <bit>
#include <cstring>
#include <utility>

#include "client/error/error_info.h"
#include "daemon/base/strings.h"

namespace tessera::client {

using shm::DescriptorKind;

static_assert(shm::kReaderSlots == 64, "one bit per reader slot");

absl::StatusOr<std::unique_ptr<MappedMemory>> MappedMemory::Open(Options options) {
  std::unique_ptr<MappedMemory> mapped(new MappedMemory(options));
  absl::StatusOr<std::unique_ptr<Extents>> extents =
      Extents::Open(*mapped->source_, options.expected, mapped->gpu_.get());
  if (!extents.ok()) return extents.status();
  mapped->extents_ = *std::move(extents);
  if (absl::Status status = mapped->MapControl(); !status.ok()) return status;
  mapped->tails_ = std::make_unique<Tails>(*mapped->source_, *mapped->control_, mapped->gpu_.get());
  return mapped;
}

MappedMemory::MappedMemory(Options& options)
    : source_(std::move(options.source)),
      gpu_(std::move(options.gpu)),
      staging_bytes_(options.staging_bytes) {}

MappedMemory::~MappedMemory() = default;

absl::Status MappedMemory::MapControl() {
  absl::StatusOr<Descriptor> page = source_->Fetch(DescriptorKind::kControl, 0);
  if (!page.ok()) return page.status();
  if (page->bytes < sizeof(shm::ControlPage)) {
    return absl::FailedPreconditionError(Concat("the control page has ", page->bytes,
                                                " bytes; this client needs ",
                                                sizeof(shm::ControlPage)));
  }
  absl::StatusOr<AddressRange> mapped =
      AddressRange::Map(page->fd.get(), page->bytes, Access::kReadWrite);
  if (!mapped.ok()) return mapped.status();
  control_memory_ = *std::move(mapped);
  control_ = reinterpret_cast<shm::ControlPage*>(control_memory_.data());
  if (control_->magic != shm::kControlMagic ||
      control_->protocol_version != shm::kProtocolVersion ||
      control_->layout_fingerprint != shm::kLayoutFingerprint) {
    return absl::FailedPreconditionError(Concat(
        "the control page has magic ", control_->magic, ", version ", control_->protocol_version,
        ", layout ", control_->layout_fingerprint, "; this client has ", shm::kControlMagic, ", ",
        shm::kProtocolVersion, ", ", shm::kLayoutFingerprint));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::uint32_t> MappedMemory::TakeSlot() {
  std::uint64_t taken = taken_slots_.load(std::memory_order_relaxed);
  for (;;) {
    const std::uint32_t slot = static_cast<std::uint32_t>(std::countr_one(taken));
    if (slot == shm::kReaderSlots) {
      return WithCause(
          absl::ResourceExhaustedError(
              Concat(shm::kReaderSlots,
                     " steps are in flight, the limit of a session; retry when one has ended")),
          ErrorCause::kReaderSlots);
    }
    // Acquire: the next user of the slot sees the state that the last one left.
    if (taken_slots_.compare_exchange_weak(taken, taken | std::uint64_t{1} << slot,
                                           std::memory_order_acquire)) {
      return slot;
    }
  }
}

void MappedMemory::ReturnSlot(std::uint32_t slot) {
  taken_slots_.fetch_and(~(std::uint64_t{1} << slot), std::memory_order_release);
}

absl::StatusOr<StagingRing*> MappedMemory::staging() {
  MutexLock lock(staging_mutex_);
  if (staging_closed_) return absl::UnavailableError("the session's memory is unmapped");
  if (staging_ring_ != nullptr) return staging_ring_.get();
  if (!staging_refused_.ok()) return staging_refused_;
  absl::StatusOr<Descriptor> arena = source_->Fetch(DescriptorKind::kStaging, 0);
  if (arena.ok() && arena->bytes < staging_bytes_) {
    arena = absl::InternalError(Concat("the staging arena has ", arena->bytes,
                                       " bytes; the daemon announced ", staging_bytes_));
  }
  if (!arena.ok()) return staging_refused_ = arena.status();
  absl::StatusOr<Mapping> mapped = Mapping::Map(*arena, gpu_.get());
  if (!mapped.ok()) return staging_refused_ = mapped.status();
  staging_memory_ = *std::move(mapped);
  staging_ring_ = std::make_unique<StagingRing>(staging_bytes_);
  return staging_ring_.get();
}

absl::Status MappedMemory::CopyToStaging(std::span<const StagingCopy> copies) {
  std::byte* const arena = staging_memory_.data();
  if (gpu_ == nullptr) {
    for (const StagingCopy& copy : copies) std::memcpy(arena + copy.to, copy.from, copy.bytes);
    return absl::OkStatus();
  }
  MutexLock lock(copy_mutex_);
  kernels::cuda::Error error;
  if (copies_ == nullptr) error = gpu_->runtime().NewQueue(&copies_);
  for (const StagingCopy& copy : copies) {
    if (error.ok()) error = copies_->Copy(arena + copy.to, copy.from, copy.bytes);
  }
  if (error.ok()) error = copies_->Wait();
  return GpuStatus(error);
}

void MappedMemory::UnmapRemovedExtents() {
  // Only the lease thread closes the gate, and this is that thread, so it need not be held.
  extents_->UnmapRemoved();
}

void MappedMemory::Close() {
  source_->Shutdown();  // first: unblocks fetches inside the gate
  {
    MutexLock lock(staging_mutex_);
    staging_closed_ = true;
    if (staging_ring_ != nullptr) staging_ring_->Close();
  }
  gate_.CloseAndWait();
  // No call is inside, but kernels that steps have launched may still run.
  if (gpu_ != nullptr) (void)gpu_->runtime().Quiesce();
  extents_->Unmap();
  tails_->Unmap();
  control_ = nullptr;
  control_memory_ = AddressRange();
  staging_memory_ = Mapping();
}

}  // namespace tessera::client
