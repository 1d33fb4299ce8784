#include <cuda_runtime.h>

#include "kernels/cuda/encode/encode.cuh"
#include "kernels/cuda/encode/observe.cuh"
#include "kernels/cuda/encode/tile_keys.cuh"
#include "kernels/cuda/encode/tile_ops_launch.h"
#include "kernels/cuda/encode/tile_ops_rows.cuh"

namespace tessera::kernels::cuda {
namespace {

constexpr std::uint32_t kDecodeThreads = 256;
// Blocks per multiprocessor for __launch_bounds__ of the encodes: 128 registers for 256 threads.
constexpr std::uint32_t kBlocks = 2;
// The same for the products of observe: 168 registers. Without the bound the compiler spills at 64.
constexpr std::uint32_t kObserveBlocks = 3;

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
__global__ void __launch_bounds__(kKeysThreads)
    KeysOfTilesKernel(const __grid_constant__ KeysTilesParams params) {
  KeysOfTile(params);
}
__global__ void __launch_bounds__(kMomentsThreads)
    MomentsTilesKernel(const __grid_constant__ MomentsTilesParams params) {
  SumMoments(params);
}

template <std::uint32_t kHeadDim>
__global__ void __launch_bounds__(kObserveThreads, kObserveBlocks)
    ObserveProductsKernel(const __grid_constant__ ObserveTilesParams params) {
  ObserveProducts<kHeadDim>(params);
}
__global__ void __launch_bounds__(kObservedKeys)
    ObserveSumsKernel(const __grid_constant__ ObserveTilesParams params) {
  ObserveSums(params);
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

template <std::uint32_t kHeadDim>
cudaError_t LaunchObserveOf(ObserveTilesParams params, cudaStream_t stream) {
  const auto pieces = static_cast<std::uint32_t>(ObservePieces(params.max_keys));
  for (params.first_query = 0; params.first_query < params.max_queries;
       params.first_query += kObservedQueries) {
    const dim3 grid(params.count, pieces, kObservedQueries / kTileColumns);
    ObserveProductsKernel<kHeadDim><<<grid, kObserveThreads, kObserveSharedBytes, stream>>>(params);
    ObserveSumsKernel<<<dim3(params.count, pieces), kObservedKeys, kObserveSumsSharedBytes,
                        stream>>>(params);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
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

cudaError_t LaunchKeysOfTiles(const KeysTilesParams& params, cudaStream_t stream) {
  if (params.count == 0) return cudaSuccess;
  if (params.strategies == nullptr || params.jobs == nullptr || !IsHeadDim(params.head_dim)) {
    return cudaErrorInvalidValue;
  }
  KeysOfTilesKernel<<<params.count, kKeysThreads, KeysSharedBytes(params.head_dim), stream>>>(
      params);
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

cudaError_t LaunchObserveTiles(const ObserveTilesParams& params, cudaStream_t stream) {
  if (params.count == 0 || params.max_keys == 0) return cudaSuccess;
  if (params.jobs == nullptr || params.scratch == nullptr || params.max_keys > kMostObservedKeys) {
    return cudaErrorInvalidValue;
  }
  if (params.form.head_dim == 64) return LaunchObserveOf<64>(params, stream);
  if (params.form.head_dim == 128) return LaunchObserveOf<128>(params, stream);
  if (params.form.head_dim == 256) return LaunchObserveOf<256>(params, stream);
  return cudaErrorInvalidValue;
}

}  // namespace tessera::kernels::cuda
