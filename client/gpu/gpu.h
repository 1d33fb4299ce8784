// The GPU that holds a session's memory, as this process accesses it.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "daemon/platform/cuda_calls.h"
#include "kernels/cuda/host/runtime.h"

namespace tessera::client {

// Access to the GPUs of this machine. Tests inject fake ones.
struct GpuPlatform {
  std::function<absl::StatusOr<std::unique_ptr<CudaCalls>>()> load_cuda;
  kernels::cuda::RuntimeSource* gpus = nullptr;

  static const GpuPlatform& System();
};

// Owned by the session's MappedMemory.
class Gpu {
 public:
  // Opens the GPU with this UUID, because the daemon may number devices differently.
  // FAILED_PRECONDITION with the reason if this process cannot use it.
  static absl::StatusOr<std::unique_ptr<Gpu>> Open(const GpuPlatform& platform,
                                                   std::string_view uuid);

  CudaCalls& calls() { return *calls_; }
  int ordinal() const { return ordinal_; }
  kernels::cuda::Runtime& runtime() { return *runtime_; }

 private:
  Gpu() = default;
  std::unique_ptr<CudaCalls> calls_;
  int ordinal_ = 0;
  std::unique_ptr<kernels::cuda::Runtime> runtime_;
};

// RESOURCE_EXHAUSTED if the device is out of memory, else INTERNAL.
absl::Status GpuStatus(const kernels::cuda::Error& error);

}  // namespace tessera::client
