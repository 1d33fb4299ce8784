// Emulates a GPU on the host: defines what kernels/cuda/common/gpu.cuh only declares for compilers
// other than nvcc.
//
// Every GPU thread is a fiber. Fibers run one at a time, in a random order, until their next warp
// or block operation. A warp often runs ahead while the others wait, so that a missing barrier
// makes code read data that is not written yet or already overwritten. The emulator guarantees
// nothing beyond the PTX documentation:
//   - shared memory starts as NaN in every block
//   - cp.async destroys its target at once and fills it only at the first warp or block barrier
//     after its thread has waited for it
//   - the test aborts if lanes of a warp meet in different operations, or if a lane is missing
// Accesses to global memory are ordinary accesses, which AddressSanitizer checks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace tessera::tests {

struct GpuLaunch {
  std::uint32_t blocks_x = 1;
  std::uint32_t blocks_y = 1;
  std::uint32_t blocks_z = 1;
  std::uint32_t threads = 32;  // a multiple of the warp size
  std::uint32_t shared_bytes = 0;
  std::uint64_t seed = 0;
};

// Runs `kernel` once per thread of the grid, one block after another in a random order.
void EmulateGpu(const GpuLaunch& launch, const std::function<void()>& kernel);

}  // namespace tessera::tests
