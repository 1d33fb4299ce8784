// The whole daemon: reads the configuration, builds the layers bottom up, serves until it is told
// to stop, and takes them down top first.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string_view>

#include "absl/status/statusor.h"
#include "daemon/platform/cuda_calls.h"
#include "kernels/cuda/host/runtime.h"

namespace tessera {

// What the node has beside its CPUs. Tests bring a GPU of their own.
struct Machine {
  std::function<absl::StatusOr<std::unique_ptr<CudaCalls>>()> load_cuda;
  kernels::cuda::RuntimeSource* gpus;
};

// `args` without the program's name. Returns the process's exit code.
int RunDaemon(std::span<const std::string_view> args, const Machine& machine);

}  // namespace tessera
