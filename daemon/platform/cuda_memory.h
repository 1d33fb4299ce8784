// Device memory shared by two processes.
//
//   the daemon                                         the worker
//   CudaRange::Reserve                                 CudaRange::Reserve
//   CudaMemory::Create at an offset ── descriptor ──▶  CudaMemory::ImportFd at the same offset
//
// Extents of an arena are then contiguous in both processes, and the importer chooses its access:
// read-only for pools, read-write for tails and staging.
//
// If a device cannot export descriptors (CudaSharing::kIpcHandle), whole allocations are shared by
// CUDA IPC: CreateUnmapped ── handle ──▶ ImportIpc. The importer always gets write access, and
// extents are not contiguous, so readers look up the base of each extent
// (kernels/cuda/common/step_view.h, DeviceArena).
//
// Either way the tenant is the trust boundary. The caller must destroy exported memory only after
// every importer has closed it or has exited.
//
// Every failure is a Status that names the call, its arguments and CUDA's error; the caller retires
// the device. Destructors unmap, release, then free addresses. They ignore errors: the device is
// then already lost.
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

// Every size and offset below must be a multiple of this.
inline constexpr std::uint64_t kCudaGranularity = std::uint64_t{2} << 20;

enum class CudaSharing : std::uint8_t { kFileDescriptor, kIpcHandle };

struct ProbedCudaDevice {
  CudaDeviceInfo info;
  CudaSharing sharing = CudaSharing::kFileDescriptor;
  std::string why_no_descriptors;  // empty with kFileDescriptor
};

// Lists all devices, usable or not.
absl::StatusOr<std::vector<CudaDeviceInfo>> ListCudaDevices(CudaCalls& calls);

// Describes a device and tests, with one granule of memory, how it can share memory.
absl::StatusOr<ProbedCudaDevice> ProbeCudaDevice(CudaCalls& calls, int device);

// A contiguous range of device addresses without memory. Must outlive the CudaMemory mapped into
// it.
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
  int mapped_ = 0;  // live CudaMemory objects in the range
};

// A piece of device memory, owned or imported. Move-only; the destructor frees or closes it.
class CudaMemory {
 public:
  CudaMemory() = default;
  CudaMemory(CudaMemory&& other) noexcept { *this = std::move(other); }
  CudaMemory& operator=(CudaMemory&& other) noexcept;
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;
  ~CudaMemory() { Reset(); }

  // Allocates memory, maps it read-write at `offset` of the range, exports a descriptor (fd()), and
  // clears the memory.
  static absl::StatusOr<CudaMemory> Create(CudaRange& range, std::uint64_t offset,
                                           std::uint64_t bytes);
  // Allocates memory at an address chosen by the driver, exports an IPC handle (ipc_handle()), and
  // clears the memory.
  static absl::StatusOr<CudaMemory> CreateUnmapped(CudaCalls& calls, int device,
                                                   std::uint64_t bytes);

  // Maps the peer's memory at `offset` of the range. The caller keeps `fd`.
  static absl::StatusOr<CudaMemory> ImportFd(CudaRange& range, std::uint64_t offset, int fd,
                                             std::uint64_t bytes, Access access);
  // Maps the peer's whole allocation, read-write.
  static absl::StatusOr<CudaMemory> ImportIpc(CudaCalls& calls, int device,
                                              const CudaIpcHandle& handle, std::uint64_t bytes);

  DeviceAddress address() const { return address_; }
  std::uint64_t bytes() const { return bytes_; }
  int fd() const { return fd_.get(); }                             // only after Create
  const CudaIpcHandle& ipc_handle() const { return ipc_handle_; }  // only after CreateUnmapped
  void Reset();

 private:
  enum class Kind : std::uint8_t { kNone, kMapped, kAllocated, kImportedIpc };
  absl::Status MapInto(CudaRange& range, std::uint64_t offset, std::uint64_t bytes, Access access);
  absl::Status Clear();
  void Swap(CudaMemory& other) noexcept;

  Kind kind_ = Kind::kNone;
  CudaCalls* calls_ = nullptr;
  CudaRange* range_ = nullptr;  // only kMapped
  int device_ = 0;
  std::uint64_t handle_ = 0;  // physical memory; 0 unless kMapped
  DeviceAddress address_ = 0;
  std::uint64_t bytes_ = 0;
  Fd fd_;
  CudaIpcHandle ipc_handle_ = {};
};

}  // namespace tessera
