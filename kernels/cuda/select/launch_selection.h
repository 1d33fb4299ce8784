// Launches the kernels that score and select blocks. Used by launch.cu only.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/common/params.h"

namespace tessera::kernels::cuda {

// Scores the blocks of segments with signs, on the grid of all scores.
cudaError_t LaunchScoreSigns(const AttendParams& params, dim3 grid, cudaStream_t stream);

cudaError_t LaunchSelection(const DeviceLimits& device, const AttendParams& params,
                            cudaStream_t stream);

}  // namespace tessera::kernels::cuda
