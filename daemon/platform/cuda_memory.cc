#include "daemon/platform/cuda_memory.h"

#include <fcntl.h>

#include <string>
#include <string_view>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/base/strings.h"

namespace tessera {

namespace {

constexpr int kOutOfMemory = 2;  // CUDA_ERROR_OUT_OF_MEMORY and cudaErrorMemoryAllocation

absl::Status CudaStatus(const CudaResult& result, std::string_view what) {
  const std::string message = Concat(what, ": ", result.name);
  return result.code == kOutOfMemory ? absl::ResourceExhaustedError(message)
                                     : absl::InternalError(message);
}

std::string At(int device, std::uint64_t bytes) { return Concat(bytes, " bytes of cuda:", device); }

absl::Status CheckSize(std::string_view what, std::uint64_t bytes) {
  if (bytes != 0 && bytes % kCudaGranularity == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(Concat(what, " of ", bytes,
                                           " bytes of device memory is not a multiple of ",
                                           kCudaGranularity, " bytes"));
}

absl::Status CheckPlace(const CudaRange& range, std::uint64_t offset, std::uint64_t bytes) {
  if (absl::Status status = CheckSize("a size", bytes); !status.ok()) return status;
  if (offset % kCudaGranularity != 0) return CheckSize("an offset", offset);
  if (offset > range.bytes() || bytes > range.bytes() - offset) {
    return absl::OutOfRangeError(Concat("device memory of ", bytes, " bytes at offset ", offset,
                                        " of a range of ", range.bytes(), " bytes"));
  }
  return absl::OkStatus();
}

// The reason why the device cannot export descriptors; empty if it can.
std::string TryDescriptors(CudaCalls& calls, const CudaDeviceInfo& info) {
  if (!info.exports_fds) return "the driver reports that it cannot export descriptors";
  if (info.granularity == 0 || kCudaGranularity % info.granularity != 0) {
    return Concat("its granularity of ", info.granularity, " bytes does not divide ",
                  kCudaGranularity);
  }
  auto range = CudaRange::Reserve(calls, info.ordinal, kCudaGranularity);
  if (!range.ok()) return std::string(range.status().message());
  const auto memory = CudaMemory::Create(**range, 0, kCudaGranularity);
  return memory.ok() ? "" : std::string(memory.status().message());
}

}  // namespace

absl::StatusOr<std::vector<CudaDeviceInfo>> ListCudaDevices(CudaCalls& calls) {
  int count = 0;
  if (CudaResult result = calls.DeviceCount(&count); !result.ok()) {
    return CudaStatus(result, "counting CUDA devices");
  }
  std::vector<CudaDeviceInfo> devices(count);
  for (int i = 0; i < count; ++i) {
    if (CudaResult result = calls.DescribeDevice(i, &devices[i]); !result.ok()) {
      return CudaStatus(result, Concat("describing cuda:", i));
    }
  }
  return devices;
}

absl::StatusOr<ProbedCudaDevice> ProbeCudaDevice(CudaCalls& calls, int device) {
  ProbedCudaDevice probed;
  if (CudaResult result = calls.DescribeDevice(device, &probed.info); !result.ok()) {
    return CudaStatus(result, Concat("describing cuda:", device));
  }
  probed.why_no_descriptors = TryDescriptors(calls, probed.info);
  if (probed.why_no_descriptors.empty()) return probed;
  probed.sharing = CudaSharing::kIpcHandle;
  const auto memory = CudaMemory::CreateUnmapped(calls, device, kCudaGranularity);
  if (!memory.ok()) return memory.status();
  return probed;
}

absl::StatusOr<std::unique_ptr<CudaRange>> CudaRange::Reserve(CudaCalls& calls, int device,
                                                              std::uint64_t bytes) {
  if (absl::Status status = CheckSize("a range", bytes); !status.ok()) return status;
  DeviceAddress address = 0;
  if (CudaResult result = calls.Reserve(bytes, kCudaGranularity, &address); !result.ok()) {
    return CudaStatus(result, Concat("reserving addresses for ", At(device, bytes)));
  }
  return std::unique_ptr<CudaRange>(new CudaRange(calls, device, address, bytes));
}

CudaRange::~CudaRange() {
  TESSERA_CHECK(mapped_ == 0, "device addresses are freed while memory is mapped there");
  (void)calls_.FreeReservation(address_, bytes_);
}

CudaMemory& CudaMemory::operator=(CudaMemory&& other) noexcept {
  if (this != &other) {
    Reset();
    Swap(other);
  }
  return *this;
}

void CudaMemory::Swap(CudaMemory& other) noexcept {
  std::swap(kind_, other.kind_);
  std::swap(calls_, other.calls_);
  std::swap(range_, other.range_);
  std::swap(device_, other.device_);
  std::swap(handle_, other.handle_);
  std::swap(address_, other.address_);
  std::swap(bytes_, other.bytes_);
  std::swap(fd_, other.fd_);
  std::swap(ipc_handle_, other.ipc_handle_);
}

void CudaMemory::Reset() {
  switch (std::exchange(kind_, Kind::kNone)) {
    case Kind::kNone:
      break;
    case Kind::kMapped:
      if (address_ != 0) {
        (void)calls_->Unmap(address_, bytes_);
        --range_->mapped_;
      }
      (void)calls_->Release(handle_);
      break;
    case Kind::kAllocated:
      (void)calls_->Free(device_, address_);
      break;
    case Kind::kImportedIpc:
      (void)calls_->CloseIpc(device_, address_);
      break;
  }
  fd_.Close();
  address_ = 0;
  bytes_ = 0;
}

// kind_ must be kMapped and handle_ set. After a failure, the destructor undoes the completed
// steps.
absl::Status CudaMemory::MapInto(CudaRange& range, std::uint64_t offset, std::uint64_t bytes,
                                 Access access) {
  const DeviceAddress address = range.address_ + offset;
  if (CudaResult result = calls_->Map(address, bytes, handle_); !result.ok()) {
    return CudaStatus(result, Concat("mapping ", At(device_, bytes), " at offset ", offset));
  }
  address_ = address;
  bytes_ = bytes;
  ++range.mapped_;
  if (CudaResult result = calls_->SetAccess(device_, address, bytes, access); !result.ok()) {
    return CudaStatus(result, Concat("making ", At(device_, bytes), " at offset ", offset,
                                     access == Access::kReadOnly ? " readable" : " writable"));
  }
  return absl::OkStatus();
}

// The driver does not promise that new memory is empty: another tenant's rows may be in it.
absl::Status CudaMemory::Clear() {
  const CudaResult result = calls_->Clear(device_, address_, bytes_);
  return result.ok() ? absl::OkStatus()
                     : CudaStatus(result, Concat("clearing ", At(device_, bytes_)));
}

absl::StatusOr<CudaMemory> CudaMemory::Create(CudaRange& range, std::uint64_t offset,
                                              std::uint64_t bytes) {
  if (absl::Status status = CheckPlace(range, offset, bytes); !status.ok()) return status;
  CudaMemory memory;
  memory.calls_ = &range.calls_;
  memory.range_ = &range;
  memory.device_ = range.device_;
  CudaResult result = range.calls_.Create(range.device_, bytes, &memory.handle_);
  if (!result.ok()) {
    return CudaStatus(result, Concat("allocating ", At(range.device_, bytes)));
  }
  memory.kind_ = Kind::kMapped;
  int fd = -1;
  result = range.calls_.ExportFd(memory.handle_, &fd);
  if (!result.ok()) {
    return CudaStatus(result, Concat("exporting ", At(range.device_, bytes)));
  }
  memory.fd_ = Fd(fd);
  // The driver does not guarantee close-on-exec, and a child process must not hold the pool.
  if (::fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) return ErrnoStatus("closing device memory on exec");
  if (absl::Status status = memory.MapInto(range, offset, bytes, Access::kReadWrite);
      !status.ok()) {
    return status;
  }
  if (absl::Status status = memory.Clear(); !status.ok()) return status;
  return memory;
}

absl::StatusOr<CudaMemory> CudaMemory::CreateUnmapped(CudaCalls& calls, int device,
                                                      std::uint64_t bytes) {
  if (absl::Status status = CheckSize("a size", bytes); !status.ok()) return status;
  CudaMemory memory;
  memory.calls_ = &calls;
  memory.device_ = device;
  CudaResult result = calls.Allocate(device, bytes, &memory.address_);
  if (!result.ok()) return CudaStatus(result, Concat("allocating ", At(device, bytes)));
  memory.kind_ = Kind::kAllocated;
  memory.bytes_ = bytes;
  result = calls.ExportIpc(device, memory.address_, &memory.ipc_handle_);
  if (!result.ok()) {
    return CudaStatus(result, Concat("exporting ", At(device, bytes), " by CUDA IPC"));
  }
  if (absl::Status status = memory.Clear(); !status.ok()) return status;
  return memory;
}

absl::StatusOr<CudaMemory> CudaMemory::ImportFd(CudaRange& range, std::uint64_t offset, int fd,
                                                std::uint64_t bytes, Access access) {
  if (absl::Status status = CheckPlace(range, offset, bytes); !status.ok()) return status;
  CudaMemory memory;
  memory.calls_ = &range.calls_;
  memory.range_ = &range;
  memory.device_ = range.device_;
  const CudaResult result = range.calls_.ImportFd(range.device_, fd, &memory.handle_);
  if (!result.ok()) {
    return CudaStatus(result, Concat("importing ", At(range.device_, bytes), " from fd ", fd));
  }
  memory.kind_ = Kind::kMapped;
  if (absl::Status status = memory.MapInto(range, offset, bytes, access); !status.ok()) {
    return status;
  }
  return memory;
}

absl::StatusOr<CudaMemory> CudaMemory::ImportIpc(CudaCalls& calls, int device,
                                                 const CudaIpcHandle& handle, std::uint64_t bytes) {
  if (absl::Status status = CheckSize("a size", bytes); !status.ok()) return status;
  CudaMemory memory;
  memory.calls_ = &calls;
  memory.device_ = device;
  const CudaResult result = calls.OpenIpc(device, handle, &memory.address_);
  if (!result.ok()) {
    return CudaStatus(result, Concat("importing ", At(device, bytes), " by CUDA IPC"));
  }
  memory.kind_ = Kind::kImportedIpc;
  memory.bytes_ = bytes;
  return memory;
}

}  // namespace tessera
