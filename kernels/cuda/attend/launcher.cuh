// Launches a kernel of a given shape. Included by the instantiation files.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/attend/launch_attend.h"

namespace tessera::kernels::cuda {

template <auto kKernel, class Shape>
struct Launcher {
  static cudaError_t Prepare() {
    return cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                static_cast<int>(Shape::kSharedBytes));
  }
  static cudaError_t Launch(const AttendParams& params, std::uint32_t blocks_x,
                            cudaStream_t stream) {
    const std::uint32_t blocks_y = (params.max_columns + Shape::kColumns - 1) / Shape::kColumns;
    kKernel<<<dim3(blocks_x, blocks_y), Shape::kThreads, Shape::kSharedBytes, stream>>>(params);
    return cudaGetLastError();
  }
};

}  // namespace tessera::kernels::cuda
