#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/cuda/select/launch_selection.h"
#include "kernels/cuda/select/score.cuh"
#include "kernels/cuda/select/select.cuh"

namespace tessera::kernels::cuda {
namespace {

template <std::uint32_t kHeadDim>
__global__ void __launch_bounds__(kScoreThreads)
    ScoreKernel(const __grid_constant__ AttendParams params) {
  ScoreBlocks<kHeadDim>(params);
}
__global__ void __launch_bounds__(kSelectThreads)
    SelectKernel(const __grid_constant__ AttendParams params) {
  SelectBlocks(params);
}

cudaError_t LaunchScore(const AttendParams& params, dim3 grid, cudaStream_t stream) {
  const std::uint32_t shared = ScoreSharedBytes(params.head_dim);
  if (params.head_dim == 64) {
    ScoreKernel<64><<<grid, kScoreThreads, shared, stream>>>(params);
  } else if (params.head_dim == 128) {
    ScoreKernel<128><<<grid, kScoreThreads, shared, stream>>>(params);
  } else {
    ScoreKernel<256><<<grid, kScoreThreads, shared, stream>>>(params);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchSelection(const DeviceLimits& device, const AttendParams& params,
                            cudaStream_t stream) {
  const std::uint32_t blocks = std::clamp<std::uint32_t>(
      params.max_pieces, 1, device.multiprocessors * kBlocksPerMultiprocessor);
  const dim3 grid(blocks, (params.max_columns + kTileColumns - 1) / kTileColumns);
  const std::uint32_t signs = SummaryBit(Summary::kSigns);
  if ((params.summaries & ~signs) != 0) {
    if (const auto error = LaunchScore(params, grid, stream); error != cudaSuccess) return error;
  }
  if ((params.summaries & signs) != 0) {
    const auto error = LaunchScoreSigns(params, grid, stream);
    if (error != cudaSuccess) return error;
  }
  SelectKernel<<<params.max_selections, kSelectThreads, kSelectSharedBytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace tessera::kernels::cuda
