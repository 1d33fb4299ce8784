// Opens the device that the configuration asks for, and owns it.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/base/mutex.h"
#include "daemon/device/device.h"
#include "daemon/platform/cuda_calls.h"
#include "kernels/cuda/host/runtime.h"

namespace tessera::device {

class Finder {
 public:
  using LoadCalls = std::function<absl::StatusOr<std::unique_ptr<CudaCalls>>()>;
  Finder(LoadCalls load_cuda, kernels::cuda::RuntimeSource& gpus)
      : load_cuda_(std::move(load_cuda)), gpus_(gpus) {}
  // The device must be destroyed before calls_.
  ~Finder() { device_.reset(); }

  // Opens a GPU and returns its memory size in bytes. Returns FAILED_PRECONDITION with a reason if
  // the GPU cannot be used.
  absl::StatusOr<std::uint64_t> OpenCuda(int ordinal);
  // The same for the GPU or MIG instance with this UUID.
  absl::StatusOr<std::uint64_t> OpenCuda(const DeviceUuid& uuid);
  void OpenCpu(const std::optional<DeviceUuid>& uuid = std::nullopt);
  // Reason of the last OpenCuda failure; empty if none has failed.
  const std::string& why_no_cuda() const { return why_no_cuda_; }

  // The device opened last.
  Device& device() const { return *device_; }
  // Sets the handler to call when the device fails; null removes it.
  void OnFailure(std::function<void(const absl::Status& why)> handler);

 private:
  absl::Status Load();
  absl::StatusOr<int> OrdinalOf(const DeviceUuid& uuid);
  absl::StatusOr<std::uint64_t> TryCuda(int ordinal);
  void Failed(const absl::Status& why);

  const LoadCalls load_cuda_;
  kernels::cuda::RuntimeSource& gpus_;
  std::unique_ptr<CudaCalls> calls_;
  std::unique_ptr<Device> device_;
  std::string why_no_cuda_;
  Mutex mutex_;
  std::function<void(const absl::Status& why)> on_failure_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::device
