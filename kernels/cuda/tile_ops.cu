#include <cuda_runtime.h>

#include "kernels/cuda/encode.cuh"
#include "kernels/cuda/tile_ops_launch.h"
#include "kernels/cuda/tile_ops_rows.cuh"

namespace tessera::kernels::cuda {
namespace {

constexpr std::uint32_t kDecodeThreads = 256;
// Blocks per multiprocessor that the encodes promise to fit: 128 registers for 256 threads.
constexpr std::uint32_t kBlocks = 2;

template <std::uint32_t kHeadDim>
__global__ void __launch_bounds__(EncodeShape<kHeadDim>::kThreads, kBlocks)
    EncodeTilesKernel(const __grid_constant__ EncodeTilesParams params) {
  EncodeTile<kHeadDim>(params);
}
template <std::uint32_t kHeadDim>
__global__ void __launch_bounds__(EncodeShape<kHeadDim>::kThreads, kBlocks)
    GatherTilesKernel(const __grid_constant__ GatherTilesParams params) {
  GatherTileRows<kHeadDim>(params);
}
__global__ void __launch_bounds__(kDecodeThreads)
    DecodeTilesKernel(const __grid_constant__ DecodeTilesParams params) {
  DecodeTile(params);
}
__global__ void __launch_bounds__(kMomentsThreads)
    MomentsTilesKernel(const __grid_constant__ MomentsTilesParams params) {
  SumMoments(params);
}

template <std::uint32_t kHeadDim>
cudaError_t LaunchEncodeOf(const EncodeTilesParams& params, cudaStream_t stream) {
  using Shape = EncodeShape<kHeadDim>;
  EncodeTilesKernel<kHeadDim>
      <<<dim3(params.count, 2), Shape::kThreads, Shape::kSharedBytes, stream>>>(params);
  return cudaGetLastError();
}

template <std::uint32_t kHeadDim>
cudaError_t LaunchGatherOf(const GatherTilesParams& params, cudaStream_t stream) {
  using Shape = EncodeShape<kHeadDim>;
  GatherTilesKernel<kHeadDim>
      <<<params.count, Shape::kThreads, Shape::kSharedBytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchEncodeTiles(const EncodeTilesParams& params, cudaStream_t stream) {
  if (params.count == 0) return cudaSuccess;
  if (params.strategies == nullptr || params.jobs == nullptr || params.unusable == nullptr) {
    return cudaErrorInvalidValue;
  }
  if (params.head_dim == 64) return LaunchEncodeOf<64>(params, stream);
  if (params.head_dim == 128) return LaunchEncodeOf<128>(params, stream);
  if (params.head_dim == 256) return LaunchEncodeOf<256>(params, stream);
  return cudaErrorInvalidValue;
}

cudaError_t LaunchDecodeTiles(const DecodeTilesParams& params, cudaStream_t stream) {
  if (params.count == 0) return cudaSuccess;
  if (params.strategies == nullptr || params.jobs == nullptr) return cudaErrorInvalidValue;
  DecodeTilesKernel<<<dim3(params.count, 2), kDecodeThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t LaunchGatherTiles(const GatherTilesParams& params, cudaStream_t stream) {
  if (params.count == 0) return cudaSuccess;
  if (params.strategies == nullptr || params.jobs == nullptr || params.rows == nullptr) {
    return cudaErrorInvalidValue;
  }
  if (params.head_dim == 64) return LaunchGatherOf<64>(params, stream);
  if (params.head_dim == 128) return LaunchGatherOf<128>(params, stream);
  if (params.head_dim == 256) return LaunchGatherOf<256>(params, stream);
  return cudaErrorInvalidValue;
}

cudaError_t LaunchMomentsTiles(const MomentsTilesParams& params, cudaStream_t stream) {
  if (params.count == 0) return cudaSuccess;
  if (params.jobs == nullptr || !IsHeadDim(params.head_dim)) return cudaErrorInvalidValue;
  const dim3 grid(params.count, MomentsSquares(params.head_dim));
  MomentsTilesKernel<<<grid, kMomentsThreads, kMomentsSharedBytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace tessera::kernels::cuda
