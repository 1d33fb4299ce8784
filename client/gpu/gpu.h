// The GPU that a session's memory is on, as this process reaches it.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "daemon/platform/cuda_calls.h"
#include "kernels/cuda/host/runtime.h"

namespace tessera::client {

// How GPUs are reached at all. Tests bring one of their own.
struct GpuPlatform {
  std::function<absl::StatusOr<std::unique_ptr<CudaCalls>>()> load_cuda;
  kernels::cuda::RuntimeSource* gpus = nullptr;

  static const GpuPlatform& System();
};

class Gpu {
 public:
  // By its UUID: the daemon may count devices otherwise. FAILED_PRECONDITION, and why, where this
  // process cannot use it.
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

// A failed call as the worker is told of it.
absl::Status GpuStatus(const kernels::cuda::Error& error);

}  // namespace tessera::client
