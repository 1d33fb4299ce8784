#include "client/mapped/mapping.h"

#include <utility>

#include "daemon/base/strings.h"

namespace tessera::client {

using shm::MemoryKind;

namespace {

absl::Status CheckKind(const Descriptor& descriptor, const Gpu* gpu) {
  if ((descriptor.memory != MemoryKind::kHost) == (gpu != nullptr)) return absl::OkStatus();
  return absl::InternalError(Concat("the daemon handed out memory of kind ",
                                    static_cast<std::uint32_t>(descriptor.memory), " on a ",
                                    gpu != nullptr ? "GPU" : "CPU"));
}

class HostPool final : public PoolMapping {
 public:
  HostPool(AddressRange range, std::uint64_t extent_bytes)
      : range_(std::move(range)), extent_bytes_(extent_bytes) {}

  absl::Status Map(std::uint32_t index, const Descriptor& extent) override {
    if (absl::Status status = CheckKind(extent, nullptr); !status.ok()) return status;
    return range_.MapAt(index * extent_bytes_, extent.fd.get(), extent.bytes, Access::kReadOnly);
  }
  absl::Status Drop(std::uint32_t index) override {
    return range_.Reset(index * extent_bytes_, extent_bytes_);
  }
  std::byte* base() const override { return range_.data(); }
  void ListExtents(std::vector<std::uint64_t>& addresses) const override { addresses.clear(); }

 private:
  AddressRange range_;
  const std::uint64_t extent_bytes_;
};

// File descriptors are mapped side by side. IPC handles are mapped wherever CUDA puts them.
class GpuPool final : public PoolMapping {
 public:
  GpuPool(Gpu& gpu, std::uint64_t bytes, std::uint64_t extent_bytes)
      : gpu_(gpu), bytes_(bytes), extent_bytes_(extent_bytes) {}

  absl::Status Map(std::uint32_t index, const Descriptor& extent) override {
    if (absl::Status status = CheckKind(extent, &gpu_); !status.ok()) return status;
    if (index < extents_.size() && extents_[index].address() != 0) {
      return absl::InternalError(
          Concat("pool extent ", index, " was replaced while this session mapped it"));
    }
    absl::StatusOr<CudaMemory> memory = Import(index, extent);
    if (!memory.ok()) return memory.status();
    if (index >= extents_.size()) extents_.resize(index + 1);
    extents_[index] = *std::move(memory);
    return absl::OkStatus();
  }
  absl::Status Drop(std::uint32_t) override { return absl::OkStatus(); }
  std::byte* base() const override { return reinterpret_cast<std::byte*>(kBase); }
  void ListExtents(std::vector<std::uint64_t>& addresses) const override {
    addresses.clear();
    for (const CudaMemory& extent : extents_) addresses.push_back(extent.address());
  }

 private:
  // An unused address, far from null: kernels find extents by the list of addresses.
  static constexpr std::uint64_t kBase = std::uint64_t{1} << 40;

  absl::StatusOr<CudaMemory> Import(std::uint32_t index, const Descriptor& extent) {
    if (extent.memory == MemoryKind::kCudaIpc) {
      return CudaMemory::ImportIpc(gpu_.calls(), gpu_.ordinal(), extent.ipc_handle, extent.bytes);
    }
    if (range_ == nullptr) {
      absl::StatusOr<std::unique_ptr<CudaRange>> range =
          CudaRange::Reserve(gpu_.calls(), gpu_.ordinal(), bytes_);
      if (!range.ok()) return range.status();
      range_ = *std::move(range);
    }
    return CudaMemory::ImportFd(*range_, index * extent_bytes_, extent.fd.get(), extent.bytes,
                                Access::kReadOnly);
  }

  Gpu& gpu_;
  const std::uint64_t bytes_;
  const std::uint64_t extent_bytes_;
  std::unique_ptr<CudaRange> range_;  // outlives the mappings in it
  std::vector<CudaMemory> extents_;
};

}  // namespace

absl::StatusOr<Mapping> Mapping::Map(const Descriptor& descriptor, Gpu* gpu) {
  if (absl::Status status = CheckKind(descriptor, gpu); !status.ok()) return status;
  Mapping mapping;
  if (gpu == nullptr) {
    absl::StatusOr<AddressRange> range =
        AddressRange::Map(descriptor.fd.get(), descriptor.bytes, Access::kReadWrite);
    if (!range.ok()) return range.status();
    mapping.host_ = *std::move(range);
    mapping.data_ = mapping.host_.data();
    mapping.bytes_ = descriptor.bytes;
    return mapping;
  }
  absl::StatusOr<CudaMemory> memory;
  if (descriptor.memory == MemoryKind::kCudaIpc) {
    memory = CudaMemory::ImportIpc(gpu->calls(), gpu->ordinal(), descriptor.ipc_handle,
                                   descriptor.bytes);
  } else {
    absl::StatusOr<std::unique_ptr<CudaRange>> range =
        CudaRange::Reserve(gpu->calls(), gpu->ordinal(), descriptor.bytes);
    if (!range.ok()) return range.status();
    mapping.range_ = *std::move(range);
    memory = CudaMemory::ImportFd(*mapping.range_, 0, descriptor.fd.get(), descriptor.bytes,
                                  Access::kReadWrite);
  }
  if (!memory.ok()) return memory.status();
  mapping.device_ = *std::move(memory);
  mapping.data_ = reinterpret_cast<std::byte*>(mapping.device_.address());
  mapping.bytes_ = descriptor.bytes;
  return mapping;
}

absl::StatusOr<std::unique_ptr<PoolMapping>> PoolMapping::Reserve(std::uint64_t bytes,
                                                                  std::uint64_t extent_bytes,
                                                                  Gpu* gpu) {
  if (gpu == nullptr) {
    absl::StatusOr<AddressRange> range = AddressRange::Reserve(bytes);
    if (!range.ok()) return range.status();
    return std::make_unique<HostPool>(*std::move(range), extent_bytes);
  }
  return std::make_unique<GpuPool>(*gpu, bytes, extent_bytes);
}

}  // namespace tessera::client
