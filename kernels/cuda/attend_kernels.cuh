// The attention kernels proper and their launchers: what the instantiation files share.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/attend_fma.cuh"
#include "kernels/cuda/attend_mma.cuh"
#include "kernels/cuda/launch_attend.h"

namespace tessera::kernels::cuda {

template <ElementType kType, std::uint32_t kHeadDim, std::uint32_t kColumnTiles>
__global__ void __launch_bounds__(MmaShape<kHeadDim, kColumnTiles>::kThreads,
                                  kColumnTiles == 1 ? MmaTuningFor(kHeadDim).blocks_per_sm : 1)
    AttendMmaKernel(const __grid_constant__ AttendParams params) {
  AttendMma<kType, kHeadDim, kColumnTiles>(params);
}

template <std::uint32_t kHeadDim>
__global__ void __launch_bounds__(FmaShape<kHeadDim>::kThreads)
    AttendFmaKernel(const __grid_constant__ AttendParams params) {
  AttendFma<kHeadDim>(params);
}

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

template <ElementType kType, std::uint32_t kHeadDim, std::uint32_t kColumnTiles>
constexpr AttendVariant MmaVariant() {
  using Shape = MmaShape<kHeadDim, kColumnTiles>;
  using Kernel = Launcher<AttendMmaKernel<kType, kHeadDim, kColumnTiles>, Shape>;
  return {.type = kType,
          .head_dim = kHeadDim,
          .columns = Shape::kColumns,
          .shared_bytes = Shape::kSharedBytes,
          .prepare = &Kernel::Prepare,
          .launch = &Kernel::Launch};
}

template <std::uint32_t kHeadDim>
constexpr AttendVariant FmaVariant() {
  using Shape = FmaShape<kHeadDim>;
  using Kernel = Launcher<AttendFmaKernel<kHeadDim>, Shape>;
  return {.type = ElementType::kFp32,
          .head_dim = kHeadDim,
          .columns = Shape::kColumns,
          .shared_bytes = Shape::kSharedBytes,
          .prepare = &Kernel::Prepare,
          .launch = &Kernel::Launch};
}

}  // namespace tessera::kernels::cuda
