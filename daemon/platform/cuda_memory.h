// Device memory that two processes share.
//
//   the daemon                                         the worker
//   CudaRange::Reserve                                 CudaRange::Reserve
//   CudaMemory::Create at an offset ── descriptor ──▶  CudaMemory::ImportFd at the same offset
//
// So extents of an arena lie side by side in both processes, and the importer chooses its own
// access: read-only for pools, read-write for what a worker fills.
//
// Where a device cannot export descriptors (CudaSharing::kIpcHandle), an allocation is shared whole
// by CUDA IPC: CreateUnmapped ── handle ──▶ ImportIpc. Its importer can write to it whatever it was
// meant to do, and extents are not contiguous: readers look up the base of each extent
// (kernels/cuda/common/step_view.h, DeviceArena).
//
// Either way the tenant is the trust boundary, and the owner destroys exported memory only after
// every importer has closed it or is gone; that rule is the caller's to keep.
//
// Every failure is a Status that names the call, its arguments and CUDA's error; the caller retires
// the device. Destructors undo in the order unmap, release, free addresses; what fails there is
// ignored, for the only failures left are a device already lost and a bug that tests would find.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/platform/cuda_calls.h"
#include "daemon/platform/fd.h"
#include "daemon/platform/memfd.h"

namespace tessera {

// Every size and offset below is a multiple of this.
inline constexpr std::uint64_t kCudaGranularity = std::uint64_t{2} << 20;

enum class CudaSharing : std::uint8_t { kFileDescriptor, kIpcHandle };

struct ProbedCudaDevice {
  CudaDeviceInfo info;
  CudaSharing sharing = CudaSharing::kFileDescriptor;
  std::string why_no_descriptors;  // empty with kFileDescriptor
};

// All devices, whether or not they can be used for anything.
absl::StatusOr<std::vector<CudaDeviceInfo>> ListCudaDevices(CudaCalls& calls);

// Describes a device and tries out, with one granule, how it can share memory.
absl::StatusOr<ProbedCudaDevice> ProbeCudaDevice(CudaCalls& calls, int device);

// Contiguous device addresses without memory. Outlives the CudaMemory mapped into it.
class CudaRange {
 public:
  static absl::StatusOr<std::unique_ptr<CudaRange>> Reserve(CudaCalls& calls, int device,
                                                            std::uint64_t bytes);
  CudaRange(const CudaRange&) = delete;
  CudaRange& operator=(const CudaRange&) = delete;
  ~CudaRange();

  DeviceAddress address() const { return address_; }
  std::uint64_t bytes() const { return bytes_; }

 private:
  friend class CudaMemory;
  CudaRange(CudaCalls& calls, int device, DeviceAddress address, std::uint64_t bytes)
      : calls_(calls), device_(device), address_(address), bytes_(bytes) {}

  CudaCalls& calls_;
  const int device_;
  const DeviceAddress address_;
  const std::uint64_t bytes_;
  int mapped_ = 0;  // CudaMemory alive in it
};

// One piece of device memory, owned or imported. Move-only; the destructor gives it back.
class CudaMemory {
 public:
  CudaMemory() = default;
  CudaMemory(CudaMemory&& other) noexcept { *this = std::move(other); }
  CudaMemory& operator=(CudaMemory&& other) noexcept;
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;
  ~CudaMemory() { Reset(); }

  // New memory, mapped read-write at `offset` of the range, and a descriptor to hand out.
  static absl::StatusOr<CudaMemory> Create(CudaRange& range, std::uint64_t offset,
                                           std::uint64_t bytes);
  // New memory at an address of the driver's choice, and a handle to hand out.
  static absl::StatusOr<CudaMemory> CreateUnmapped(CudaCalls& calls, int device,
                                                   std::uint64_t bytes);

  // The peer's memory at `offset` of the range. `fd` stays the caller's.
  static absl::StatusOr<CudaMemory> ImportFd(CudaRange& range, std::uint64_t offset, int fd,
                                             std::uint64_t bytes, Access access);
  // The peer's whole allocation, read-write.
  static absl::StatusOr<CudaMemory> ImportIpc(CudaCalls& calls, int device,
                                              const CudaIpcHandle& handle, std::uint64_t bytes);

  DeviceAddress address() const { return address_; }
  std::uint64_t bytes() const { return bytes_; }
  int fd() const { return fd_.get(); }                             // of Create
  const CudaIpcHandle& ipc_handle() const { return ipc_handle_; }  // of CreateUnmapped
  void Reset();

 private:
  enum class Kind : std::uint8_t { kNone, kMapped, kAllocated, kImportedIpc };
  absl::Status MapInto(CudaRange& range, std::uint64_t offset, std::uint64_t bytes, Access access);
  void Swap(CudaMemory& other) noexcept;

  Kind kind_ = Kind::kNone;
  CudaCalls* calls_ = nullptr;
  CudaRange* range_ = nullptr;  // where kMapped
  int device_ = 0;
  std::uint64_t handle_ = 0;  // physical memory; 0 where not of a range
  DeviceAddress address_ = 0;
  std::uint64_t bytes_ = 0;
  Fd fd_;
  CudaIpcHandle ipc_handle_ = {};
};

}  // namespace tessera
