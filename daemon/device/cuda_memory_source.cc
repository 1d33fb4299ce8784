#include "daemon/device/cuda_memory_source.h"

#include <utility>

namespace tessera::device {

namespace {

std::byte* Pointer(DeviceAddress address) { return reinterpret_cast<std::byte*>(address); }

// A piece of GPU memory. Also owns its address range, if it has a separate one.
class Piece final : public Memory {
 public:
  Piece(std::unique_ptr<CudaRange> range, CudaMemory memory, CudaSharing sharing)
      : range_(std::move(range)), memory_(std::move(memory)), sharing_(sharing) {}

  std::byte* data() const override { return Pointer(memory_.address()); }
  std::uint64_t bytes() const override { return memory_.bytes(); }
  absl::StatusOr<Export> Share() const override {
    Export share = {.bytes = memory_.bytes()};
    if (sharing_ == CudaSharing::kIpcHandle) {
      share.kind = shm::MemoryKind::kCudaIpc;
      share.ipc_handle = memory_.ipc_handle();
      return share;
    }
    share.kind = shm::MemoryKind::kCudaDescriptor;
    if (absl::Status status = DuplicateFd(memory_.fd(), &share.fd); !status.ok()) return status;
    return share;
  }

 private:
  const std::unique_ptr<CudaRange> range_;
  const CudaMemory memory_;
  const CudaSharing sharing_;
};

// A contiguous address range. Extents are mapped at their offsets.
class MappedSpace final : public Space {
 public:
  explicit MappedSpace(std::unique_ptr<CudaRange> range) : range_(std::move(range)) {}

  absl::StatusOr<std::unique_ptr<Memory>> Create(std::uint64_t offset,
                                                 std::uint64_t bytes) override {
    absl::StatusOr<CudaMemory> memory = CudaMemory::Create(*range_, offset, bytes);
    if (!memory.ok()) return memory.status();
    return std::make_unique<Piece>(nullptr, *std::move(memory), CudaSharing::kFileDescriptor);
  }
  std::byte* base() const override { return Pointer(range_->address()); }

 private:
  const std::unique_ptr<CudaRange> range_;
};

// Extents at addresses that the driver chooses.
class ScatteredSpace final : public Space {
 public:
  ScatteredSpace(CudaCalls& calls, int ordinal) : calls_(calls), ordinal_(ordinal) {}

  absl::StatusOr<std::unique_ptr<Memory>> Create(std::uint64_t, std::uint64_t bytes) override {
    absl::StatusOr<CudaMemory> memory = CudaMemory::CreateUnmapped(calls_, ordinal_, bytes);
    if (!memory.ok()) return memory.status();
    return std::make_unique<Piece>(nullptr, *std::move(memory), CudaSharing::kIpcHandle);
  }
  // An arbitrary base far from null that is never dereferenced; see Space::base.
  std::byte* base() const override { return Pointer(DeviceAddress{1} << 40); }

 private:
  CudaCalls& calls_;
  const int ordinal_;
};

class CudaPoolMemory final : public MemorySource {
 public:
  CudaPoolMemory(CudaCalls& calls, int ordinal, CudaSharing sharing)
      : calls_(calls), ordinal_(ordinal), sharing_(sharing) {}

  absl::StatusOr<std::unique_ptr<Space>> Reserve(std::uint64_t bytes) override {
    if (sharing_ == CudaSharing::kIpcHandle) {
      return std::make_unique<ScatteredSpace>(calls_, ordinal_);
    }
    absl::StatusOr<std::unique_ptr<CudaRange>> range = CudaRange::Reserve(calls_, ordinal_, bytes);
    if (!range.ok()) return range.status();
    return std::make_unique<MappedSpace>(*std::move(range));
  }

 private:
  CudaCalls& calls_;
  const int ordinal_;
  const CudaSharing sharing_;
};

}  // namespace

std::unique_ptr<MemorySource> NewCudaPoolMemory(CudaCalls& calls, int ordinal,
                                                CudaSharing sharing) {
  return std::make_unique<CudaPoolMemory>(calls, ordinal, sharing);
}

absl::StatusOr<std::unique_ptr<Memory>> CreateCudaWorkerMemory(CudaCalls& calls, int ordinal,
                                                               CudaSharing sharing,
                                                               std::uint64_t bytes) {
  if (sharing == CudaSharing::kIpcHandle) {
    absl::StatusOr<CudaMemory> memory = CudaMemory::CreateUnmapped(calls, ordinal, bytes);
    if (!memory.ok()) return memory.status();
    return std::make_unique<Piece>(nullptr, *std::move(memory), sharing);
  }
  absl::StatusOr<std::unique_ptr<CudaRange>> range = CudaRange::Reserve(calls, ordinal, bytes);
  if (!range.ok()) return range.status();
  absl::StatusOr<CudaMemory> memory = CudaMemory::Create(**range, 0, bytes);
  if (!memory.ok()) return memory.status();
  return std::make_unique<Piece>(*std::move(range), *std::move(memory), sharing);
}

}  // namespace tessera::device
