// The attention kernels over selected quads, included by their instantiation files.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/attend/attend_planes_selected.cuh"
#include "kernels/cuda/attend/launch_attend.h"
#include "kernels/cuda/attend/launcher.cuh"

namespace tessera::kernels::cuda {

template <std::uint32_t kHeadDim, std::uint32_t kColumnTiles, PartKind kKind>
__global__ void __launch_bounds__(QuadShape<kHeadDim, kColumnTiles>::kThreads,
                                  kColumnTiles == 1 ? PlanesTuningFor(kHeadDim).blocks_per_sm : 1)
    AttendPlanesSelectedKernel(const __grid_constant__ AttendParams params) {
  AttendPlanesSelected<kHeadDim, kColumnTiles, kKind>(params);
}

template <std::uint32_t kHeadDim, std::uint32_t kColumnTiles, PartKind kKind>
constexpr AttendVariant SelectedPlanesVariant() {
  using Shape = SelectedShape<QuadShape<kHeadDim, kColumnTiles>>;
  using Kernel = Launcher<AttendPlanesSelectedKernel<kHeadDim, kColumnTiles, kKind>, Shape>;
  return {.kind = kKind,
          .type = ElementType::kBf16,
          .head_dim = kHeadDim,
          .columns = Shape::kColumns,
          .shared_bytes = Shape::kSharedBytes,
          .prepare = &Kernel::Prepare,
          .launch = &Kernel::Launch};
}

}  // namespace tessera::kernels::cuda
