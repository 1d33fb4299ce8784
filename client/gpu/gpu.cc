#include "client/gpu/gpu.h"

#include <cstring>
#include <vector>

#include "daemon/base/strings.h"
#include "daemon/platform/cuda_memory.h"

namespace tessera::client {

namespace {

absl::Status Unusable(std::string_view why) {
  return absl::FailedPreconditionError(
      Concat("the daemon keeps KV on a GPU that this process cannot use: ", why,
             "; set map_memory=false to use RPC"));
}

}  // namespace

const GpuPlatform& GpuPlatform::System() {
  static const GpuPlatform platform = {.load_cuda = LoadCuda, .gpus = &kernels::cuda::SystemGpus()};
  return platform;
}

absl::StatusOr<std::unique_ptr<Gpu>> Gpu::Open(const GpuPlatform& platform, std::string_view uuid) {
  std::unique_ptr<Gpu> gpu(new Gpu());
  absl::StatusOr<std::unique_ptr<CudaCalls>> calls = platform.load_cuda();
  if (!calls.ok()) return Unusable(AsStringView(calls.status().message()));
  gpu->calls_ = *std::move(calls);
  const absl::StatusOr<std::vector<CudaDeviceInfo>> devices = ListCudaDevices(*gpu->calls_);
  if (!devices.ok()) return Unusable(AsStringView(devices.status().message()));
  for (const CudaDeviceInfo& device : *devices) {
    if (uuid.size() != device.uuid.bytes.size() ||
        std::memcmp(uuid.data(), device.uuid.bytes.data(), uuid.size()) != 0) {
      continue;
    }
    gpu->ordinal_ = device.ordinal;
    std::string reason;
    gpu->runtime_ = platform.gpus->Open(device.ordinal, &reason);
    if (gpu->runtime_ == nullptr) return Unusable(reason);
    return gpu;
  }
  return Unusable(Concat("it is not among the ", devices->size(),
                         " devices visible to this process; check CUDA_VISIBLE_DEVICES"));
}

absl::Status GpuStatus(const kernels::cuda::Error& error) {
  if (error.ok()) return absl::OkStatus();
  if (error.out_of_memory()) return absl::ResourceExhaustedError(error.text());
  return absl::InternalError(Concat("a GPU call failed in this process: ", error.text()));
}

}  // namespace tessera::client
