// Launches the kernels that score and select blocks. Used by launch.cu only.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/common/params.h"

namespace tessera::kernels::cuda {

cudaError_t LaunchSelection(const DeviceLimits& device, const AttendParams& params,
                            cudaStream_t stream);

}  // namespace tessera::kernels::cuda
