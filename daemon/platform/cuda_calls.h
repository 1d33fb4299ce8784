// The CUDA calls that memory management needs, as a table: the driver behind it, or a fake.
// Compiles without CUDA; a build without a toolkit has no table to load and says so.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/platform/memfd.h"

namespace tessera {

using DeviceAddress = std::uint64_t;              // 0: none
using CudaIpcHandle = std::array<std::byte, 64>;  // bytes to send; mean nothing here

// What a call answered: the CUDA error's name, e.g. "CUDA_ERROR_OUT_OF_MEMORY".
struct CudaResult {
  int code = 0;
  const char* name = "";
  bool ok() const { return code == 0; }
};

struct CudaDeviceInfo {
  int ordinal = 0;
  std::string name;
  std::array<std::byte, 16> uuid = {};
  int compute_major = 0;
  int compute_minor = 0;
  std::uint64_t memory_bytes = 0;
  std::uint64_t granularity = 0;  // of virtual memory allocations; 0 where it has none
  bool exports_fds = false;       // says it can export memory as file descriptors
};

// Thread-safe, as CUDA is. Calls that name a device make it the calling thread's current one.
class CudaCalls {
 public:
  virtual ~CudaCalls() = default;

  virtual CudaResult DeviceCount(int* count) = 0;
  virtual CudaResult DescribeDevice(int device, CudaDeviceInfo* info) = 0;

  // Virtual memory management: physical memory, addresses, and mapping one at the other.
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

  // Whole allocations and CUDA IPC. An importer always gets read-write access.
  virtual CudaResult Allocate(int device, std::uint64_t bytes, DeviceAddress* address) = 0;
  virtual CudaResult Free(int device, DeviceAddress address) = 0;
  virtual CudaResult ExportIpc(int device, DeviceAddress address, CudaIpcHandle* handle) = 0;
  virtual CudaResult OpenIpc(int device, const CudaIpcHandle& handle, DeviceAddress* address) = 0;
  virtual CudaResult CloseIpc(int device, DeviceAddress address) = 0;
};

// FAILED_PRECONDITION: this build has no CUDA, or this machine no usable driver. The driver library
// is looked up here, when called: a binary starts where there is none.
absl::StatusOr<std::unique_ptr<CudaCalls>> LoadCuda();

}  // namespace tessera
