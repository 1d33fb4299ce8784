// A machine that runs the source of the CUDA kernels on the host: the definitions of what
// kernels/cuda/common/gpu.cuh only declares for other compilers than nvcc.
//
// Every GPU thread is a fiber. They run one at a time, in an order drawn from the seed, each until
// its next warp or block operation, and a warp often runs on while the others stand still: code
// that lacks a barrier reads what was not written yet, or what was overwritten already. Beyond what
// the PTX documentation promises, nothing is kind:
//   - shared memory starts as NaN in every block
//   - cp.async destroys its target at once and fills it only at the first warp or block barrier
//     after its thread has waited for it
//   - lanes of a warp that meet in different operations, or not all, abort the test
// Accesses to global memory are plain accesses: AddressSanitizer sees them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace tessera::tests {

struct GpuLaunch {
  std::uint32_t blocks_x = 1;
  std::uint32_t blocks_y = 1;
  std::uint32_t blocks_z = 1;
  std::uint32_t threads = 32;  // whole warps
  std::uint32_t shared_bytes = 0;
  std::uint64_t seed = 0;
};

// Runs `kernel` once per thread of the grid, block after block in an order drawn from the seed.
void EmulateGpu(const GpuLaunch& launch, const std::function<void()>& kernel);

}  // namespace tessera::tests
