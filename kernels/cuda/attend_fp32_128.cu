#include "kernels/cuda/attend_kernels.cuh"

namespace tessera::kernels::cuda {

const AttendVariant kAttendFp32Dim128[1] = {FmaVariant<128>()};

}  // namespace tessera::kernels::cuda
