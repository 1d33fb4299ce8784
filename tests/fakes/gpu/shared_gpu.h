// Emulates a GPU's memory with memfds that are mapped at the device addresses. Processes share it
// by descriptor or by a handle like CUDA IPC's. Together with EmulatedRuntime it is a complete,
// slow GPU on the host.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "daemon/base/mutex.h"
#include "daemon/platform/cuda_calls.h"
#include "daemon/platform/fd.h"

namespace tessera::tests {

class SharedGpu final : public CudaCalls {
 public:
  struct Options {
    bool exports_fds = true;  // false: only CUDA IPC
    std::uint64_t memory_bytes = std::uint64_t{1} << 30;
    std::vector<DeviceUuid> uuids = {SomeUuid()};  // one per device
    int current = 0;                               // device of every thread
  };
  static DeviceUuid SomeUuid() {
    DeviceUuid uuid;
    uuid.bytes.fill(std::byte{0x5e});
    return uuid;
  }
  SharedGpu() : SharedGpu(Options{}) {}
  explicit SharedGpu(const Options& options) : options_(options) {}
  ~SharedGpu() override;

  // Number of objects created or imported and not yet released.
  std::size_t live() const;

  CudaResult DeviceCount(int* count) override;
  CudaResult DescribeDevice(int device, CudaDeviceInfo* info) override;
  CudaResult CurrentDevice(int* device) override;
  CudaResult Create(int device, std::uint64_t bytes, std::uint64_t* handle) override;
  CudaResult Release(std::uint64_t handle) override;
  CudaResult ExportFd(std::uint64_t handle, int* fd) override;
  CudaResult ImportFd(int device, int fd, std::uint64_t* handle) override;
  CudaResult Reserve(std::uint64_t bytes, std::uint64_t alignment, DeviceAddress* address) override;
  CudaResult FreeReservation(DeviceAddress address, std::uint64_t bytes) override;
  CudaResult Map(DeviceAddress address, std::uint64_t bytes, std::uint64_t handle) override;
  CudaResult Unmap(DeviceAddress address, std::uint64_t bytes) override;
  CudaResult SetAccess(int device, DeviceAddress address, std::uint64_t bytes,
                       Access access) override;
  // New memory is a new file, which has zeros.
  CudaResult Clear(int, DeviceAddress, std::uint64_t) override { return {}; }
  CudaResult Allocate(int device, std::uint64_t bytes, DeviceAddress* address) override;
  CudaResult Free(int device, DeviceAddress address) override;
  CudaResult ExportIpc(int device, DeviceAddress address, CudaIpcHandle* handle) override;
  CudaResult OpenIpc(int device, const CudaIpcHandle& handle, DeviceAddress* address) override;
  CudaResult CloseIpc(int device, DeviceAddress address) override;

 private:
  struct Piece {
    Fd memory;
    std::uint64_t bytes = 0;
  };
  CudaResult MapWhole(Fd memory, std::uint64_t bytes, DeviceAddress* address);
  CudaResult UnmapWhole(DeviceAddress address);

  const Options options_;
  mutable Mutex mutex_;
  std::uint64_t next_handle_ TESSERA_GUARDED_BY(mutex_) = 1;
  std::map<std::uint64_t, Piece> pieces_ TESSERA_GUARDED_BY(mutex_);       // by handle
  std::map<DeviceAddress, Piece> allocations_ TESSERA_GUARDED_BY(mutex_);  // own and opened
};

}  // namespace tessera::tests
