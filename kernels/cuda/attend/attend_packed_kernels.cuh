// The packed attention kernels, included by their instantiation files.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/attend/attend_packed.cuh"
#include "kernels/cuda/attend/launch_attend.h"
#include "kernels/cuda/attend/launcher.cuh"

namespace tessera::kernels::cuda {

template <ValueType kValues, std::uint32_t kHeadDim, std::uint32_t kColumnTiles>
__global__ void __launch_bounds__(PackedShape<kValues, kHeadDim, kColumnTiles>::kThreads,
                                  kColumnTiles == 1 ? PackedTuningFor(kHeadDim).blocks_per_sm : 1)
    AttendPackedKernel(const __grid_constant__ AttendParams params) {
  AttendPacked<kValues, kHeadDim, kColumnTiles>(params);
}

template <ValueType kValues, std::uint32_t kHeadDim, std::uint32_t kColumnTiles>
__global__ void __launch_bounds__(PackedShape<kValues, kHeadDim, kColumnTiles>::kThreads,
                                  kColumnTiles == 1 ? PackedTuningFor(kHeadDim).blocks_per_sm : 1)
    AttendPackedSelectedKernel(const __grid_constant__ AttendParams params) {
  AttendPackedSelected<kValues, kHeadDim, kColumnTiles>(params);
}

template <ValueType kValues, std::uint32_t kHeadDim, std::uint32_t kColumnTiles>
constexpr AttendVariant PackedVariant() {
  using Shape = PackedShape<kValues, kHeadDim, kColumnTiles>;
  using Kernel = Launcher<AttendPackedKernel<kValues, kHeadDim, kColumnTiles>, Shape>;
  return {.kind = KindOf({.format = PackedFormat(kValues)}),
          .type = Shape::kType,
          .head_dim = kHeadDim,
          .columns = Shape::kColumns,
          .shared_bytes = Shape::kSharedBytes,
          .prepare = &Kernel::Prepare,
          .launch = &Kernel::Launch};
}

template <ValueType kValues, std::uint32_t kHeadDim, std::uint32_t kColumnTiles>
constexpr AttendVariant SelectedPackedVariant() {
  using Packed = PackedShape<kValues, kHeadDim, kColumnTiles>;
  using Shape = SelectedShape<Packed>;
  using Kernel = Launcher<AttendPackedSelectedKernel<kValues, kHeadDim, kColumnTiles>, Shape>;
  return {.kind = KindOf({.format = PackedFormat(kValues)}),
          .type = Packed::kType,
          .head_dim = kHeadDim,
          .columns = Shape::kColumns,
          .shared_bytes = Shape::kSharedBytes,
          .prepare = &Kernel::Prepare,
          .launch = &Kernel::Launch};
}

}  // namespace tessera::kernels::cuda
