// The dense attention kernels, included by their instantiation files.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/attend/attend_fma.cuh"
#include "kernels/cuda/attend/attend_mma.cuh"
#include "kernels/cuda/attend/launch_attend.h"
#include "kernels/cuda/attend/launcher.cuh"

namespace tessera::kernels::cuda {

template <ElementType kType, std::uint32_t kHeadDim, std::uint32_t kColumnTiles, bool kWords>
__global__ void __launch_bounds__(MmaShape<kHeadDim, kColumnTiles>::kThreads,
                                  kColumnTiles == 1 ? MmaTuningFor(kHeadDim).blocks_per_sm : 1)
    AttendMmaKernel(const __grid_constant__ AttendParams params) {
  AttendMma<kType, kHeadDim, kColumnTiles, kWords>(params);
}

template <std::uint32_t kHeadDim, bool kWords>
__global__ void __launch_bounds__(FmaShape<kHeadDim>::kThreads,
                                  FmaTuningFor(kHeadDim).blocks_per_sm)
    AttendFmaKernel(const __grid_constant__ AttendParams params) {
  AttendFma<kHeadDim, kWords>(params);
}

template <ElementType kType, std::uint32_t kHeadDim, std::uint32_t kColumnTiles>
__global__ void __launch_bounds__(MmaShape<kHeadDim, kColumnTiles, true>::kThreads,
                                  kColumnTiles == 1 ? MmaTuningFor(kHeadDim).blocks_per_sm : 1)
    AttendMmaSelectedKernel(const __grid_constant__ AttendParams params) {
  AttendMmaSelected<kType, kHeadDim, kColumnTiles>(params);
}

template <std::uint32_t kHeadDim>
__global__ void __launch_bounds__(FmaShape<kHeadDim>::kThreads,
                                  FmaTuningFor(kHeadDim).blocks_per_sm)
    AttendFmaSelectedKernel(const __grid_constant__ AttendParams params) {
  AttendFmaSelected<kHeadDim>(params);
}

template <ElementType kType, std::uint32_t kHeadDim, std::uint32_t kColumnTiles,
          bool kWords = false>
constexpr AttendVariant MmaVariant() {
  using Shape = MmaShape<kHeadDim, kColumnTiles, kWords>;
  using Kernel = Launcher<AttendMmaKernel<kType, kHeadDim, kColumnTiles, kWords>, Shape>;
  return {.kind = kWords ? PartKind::kDenseWords : PartKind::kDense,
          .type = kType,
          .head_dim = kHeadDim,
          .columns = Shape::kColumns,
          .shared_bytes = Shape::kSharedBytes,
          .prepare = &Kernel::Prepare,
          .launch = &Kernel::Launch};
}

template <std::uint32_t kHeadDim, bool kWords = false>
constexpr AttendVariant FmaVariant() {
  using Shape = FmaShape<kHeadDim>;
  using Kernel = Launcher<AttendFmaKernel<kHeadDim, kWords>, Shape>;
  return {.kind = kWords ? PartKind::kDenseWords : PartKind::kDense,
          .type = ElementType::kFp32,
          .head_dim = kHeadDim,
          .columns = Shape::kColumns,
          .shared_bytes = Shape::kSharedBytes,
          .prepare = &Kernel::Prepare,
          .launch = &Kernel::Launch};
}

template <ElementType kType, std::uint32_t kHeadDim, std::uint32_t kColumnTiles>
constexpr AttendVariant SelectedMmaVariant() {
  using Shape = SelectedShape<MmaShape<kHeadDim, kColumnTiles, true>>;
  using Kernel = Launcher<AttendMmaSelectedKernel<kType, kHeadDim, kColumnTiles>, Shape>;
  return {.kind = PartKind::kDenseWords,
          .type = kType,
          .head_dim = kHeadDim,
          .columns = Shape::kColumns,
          .shared_bytes = Shape::kSharedBytes,
          .prepare = &Kernel::Prepare,
          .launch = &Kernel::Launch};
}

template <std::uint32_t kHeadDim>
constexpr AttendVariant SelectedFmaVariant() {
  using Shape = SelectedShape<FmaShape<kHeadDim>>;
  using Kernel = Launcher<AttendFmaSelectedKernel<kHeadDim>, Shape>;
  return {.kind = PartKind::kDenseWords,
          .type = ElementType::kFp32,
          .head_dim = kHeadDim,
          .columns = Shape::kColumns,
          .shared_bytes = Shape::kSharedBytes,
          .prepare = &Kernel::Prepare,
          .launch = &Kernel::Launch};
}

}  // namespace tessera::kernels::cuda
