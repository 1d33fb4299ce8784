// A Runtime whose device is the emulated machine: device memory is host memory, every call is
// carried out before it returns, and the kernels' own source runs.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/cuda/host/runtime.h"
#include "tests/fakes/gpu/emulated_kernels.h"

namespace tessera::tests {

struct EmulatedRuntimeOptions {
  EmulatedGrid grid;
  // Queue calls until one fails, and every later one with it; negative: none does.
  int fails_after = -1;
  std::uint64_t memory_bytes = 0;  // 0: as much as is asked for
};

std::unique_ptr<kernels::cuda::Runtime> NewEmulatedRuntime(const EmulatedRuntimeOptions& options);

// Hands out emulated runtimes for device 0.
class EmulatedGpus final : public kernels::cuda::RuntimeSource {
 public:
  EmulatedRuntimeOptions options;
  std::unique_ptr<kernels::cuda::Runtime> Open(int device, std::string* reason) override;
};

}  // namespace tessera::tests
