// A Runtime on the emulated GPU: device memory is host memory, calls finish before they return, and
// the kernels run from their own source.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/cuda/host/runtime.h"
#include "tests/fakes/gpu/emulated_kernels.h"

namespace tessera::tests {

struct EmulatedRuntimeOptions {
  EmulatedGrid grid;
  // The number of successful queue calls before all further ones fail. Negative: none fails.
  int fails_after = -1;
  std::uint64_t memory_bytes = 0;  // 0: unlimited
};

std::unique_ptr<kernels::cuda::Runtime> NewEmulatedRuntime(const EmulatedRuntimeOptions& options);

// Creates emulated runtimes for devices 0 to `devices` - 1.
class EmulatedGpus final : public kernels::cuda::RuntimeSource {
 public:
  EmulatedRuntimeOptions options;
  int devices = 1;
  std::unique_ptr<kernels::cuda::Runtime> Open(int device, std::string* reason) override;
};

}  // namespace tessera::tests
