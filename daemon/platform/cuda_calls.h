// CudaCalls: the CUDA calls that memory management needs, implemented by the driver or by a fake.
// The interface compiles without CUDA; LoadCuda fails in a build without a CUDA toolkit.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/platform/device_uuid.h"
#include "daemon/platform/memfd.h"

namespace tessera {

using DeviceAddress = std::uint64_t;              // 0: none
using CudaIpcHandle = std::array<std::byte, 64>;  // opaque bytes to send to the importer

// The result of a call. `name` is the CUDA error's, e.g. "CUDA_ERROR_OUT_OF_MEMORY".
struct CudaResult {
  int code = 0;
  const char* name = "";
  bool ok() const { return code == 0; }
};

struct CudaDeviceInfo {
  int ordinal = 0;
  std::string name;
  DeviceUuid uuid;
  int compute_major = 0;
  int compute_minor = 0;
  std::uint64_t memory_bytes = 0;
  std::uint64_t granularity = 0;  // of virtual memory allocations; 0: unsupported
  bool exports_fds = false;       // reports that it can export memory as descriptors
};

// Thread-safe. A call that names a device makes it the current device of the calling thread.
class CudaCalls {
 public:
  virtual ~CudaCalls() = default;

  virtual CudaResult DeviceCount(int* count) = 0;
  virtual CudaResult DescribeDevice(int device, CudaDeviceInfo* info) = 0;
  // The device of the calling thread's CUDA context; without a context, the device it would use.
  virtual CudaResult CurrentDevice(int* device) = 0;

  // Virtual memory management: physical memory, address ranges, and mappings between them.
  virtual CudaResult Create(int device, std::uint64_t bytes, std::uint64_t* handle) = 0;
  virtual CudaResult Release(std::uint64_t handle) = 0;
  virtual CudaResult ExportFd(std::uint64_t handle, int* fd) = 0;              // a new descriptor
  virtual CudaResult ImportFd(int device, int fd, std::uint64_t* handle) = 0;  // keeps no fd
  virtual CudaResult Reserve(std::uint64_t bytes, std::uint64_t alignment,
                             DeviceAddress* address) = 0;
  virtual CudaResult FreeReservation(DeviceAddress address, std::uint64_t bytes) = 0;
  virtual CudaResult Map(DeviceAddress address, std::uint64_t bytes, std::uint64_t handle) = 0;
  virtual CudaResult Unmap(DeviceAddress address, std::uint64_t bytes) = 0;
  virtual CudaResult SetAccess(int device, DeviceAddress address, std::uint64_t bytes,
                               Access access) = 0;
  // Writes zeros, and waits until they are written.
  virtual CudaResult Clear(int device, DeviceAddress address, std::uint64_t bytes) = 0;

  // Whole allocations, shared by CUDA IPC. An importer always gets read-write access.
  virtual CudaResult Allocate(int device, std::uint64_t bytes, DeviceAddress* address) = 0;
  virtual CudaResult Free(int device, DeviceAddress address) = 0;
  virtual CudaResult ExportIpc(int device, DeviceAddress address, CudaIpcHandle* handle) = 0;
  virtual CudaResult OpenIpc(int device, const CudaIpcHandle& handle, DeviceAddress* address) = 0;
  virtual CudaResult CloseIpc(int device, DeviceAddress address) = 0;
};

// Loads the driver library. It is loaded on this call only, so a binary also starts on machines
// without one. FAILED_PRECONDITION if the build has no CUDA or the machine no usable driver.
absl::StatusOr<std::unique_ptr<CudaCalls>> LoadCuda();

}  // namespace tessera
