// RunDaemon: reads the configuration, builds the layers of the daemon bottom up, serves until a
// stop is requested, and destroys the layers top down.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string_view>

#include "absl/status/statusor.h"
#include "daemon/platform/cuda_calls.h"
#include "kernels/cuda/host/runtime.h"

namespace tessera {

// Access to the node's GPUs. Tests pass fakes.
struct Machine {
  std::function<absl::StatusOr<std::unique_ptr<CudaCalls>>()> load_cuda;
  kernels::cuda::RuntimeSource* gpus;
};

// `args` excludes the program's name. Returns the exit code of the process.
int RunDaemon(std::span<const std::string_view> args, const Machine& machine);

}  // namespace tessera
