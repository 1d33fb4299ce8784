// An emulated GPU, shared by the test process and the daemons it starts. Memory is shared by
// descriptors, or by CUDA IPC for a GPU that exports none.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/gpu/gpu.h"
#include "tests/fakes/daemon/daemon_process.h"
#include "tests/fakes/gpu/emulated_runtime.h"
#include "tests/fakes/gpu/shared_gpu.h"

namespace tessera {

class EmulatedGpu {
 public:
  explicit EmulatedGpu(bool by_descriptor) : by_descriptor_(by_descriptor) {
    platform.load_cuda = [by_descriptor]() -> absl::StatusOr<std::unique_ptr<CudaCalls>> {
      return std::make_unique<tests::SharedGpu>(
          tests::SharedGpu::Options{.exports_fds = by_descriptor});
    };
    platform.gpus = &gpus;
  }
  EmulatedGpu(const EmulatedGpu&) = delete;
  EmulatedGpu& operator=(const EmulatedGpu&) = delete;

  std::unique_ptr<fakes::DaemonProcess> StartDaemon(std::vector<std::string> flags) const {
    if (!by_descriptor_) flags.push_back("--gpu-shares-by-ipc");
    return fakes::DaemonProcess::Start(
        {.flags = std::move(flags), .pool_bytes = "256MiB", .binary = EMULATED_GPU_DAEMON});
  }

  tests::EmulatedGpus gpus;
  client::GpuPlatform platform;  // the GPUs that workers of this process find

 private:
  const bool by_descriptor_;
};

// A base class before the workers of a fixture, so that the GPU outlives them.
struct WithEmulatedGpu {
  EmulatedGpu gpu{true};
};

}  // namespace tessera
