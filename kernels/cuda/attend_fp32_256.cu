#include "kernels/cuda/attend_kernels.cuh"

namespace tessera::kernels::cuda {

const AttendVariant kAttendFp32Dim256[1] = {FmaVariant<256>()};

}  // namespace tessera::kernels::cuda
