#include <cuda_runtime.h>

#include "kernels/cuda/select/launch_selection.h"
#include "kernels/cuda/select/sign_scores.cuh"

namespace tessera::kernels::cuda {
namespace {

template <std::uint32_t kHeadDim>
__global__ void __launch_bounds__(kScoreThreads)
    ScoreSignsKernel(const __grid_constant__ AttendParams params) {
  ScoreSigns<kHeadDim>(params);
}

}  // namespace

cudaError_t LaunchScoreSigns(const AttendParams& params, dim3 grid, cudaStream_t stream) {
  if (params.head_dim == 64) {
    ScoreSignsKernel<64><<<grid, kScoreThreads, kSignSharedBytes, stream>>>(params);
  } else if (params.head_dim == 128) {
    ScoreSignsKernel<128><<<grid, kScoreThreads, kSignSharedBytes, stream>>>(params);
  } else {
    ScoreSignsKernel<256><<<grid, kScoreThreads, kSignSharedBytes, stream>>>(params);
  }
  return cudaGetLastError();
}

}  // namespace tessera::kernels::cuda
