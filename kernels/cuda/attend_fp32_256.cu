#include "kernels/cuda/attend_kernels.cuh"

namespace tessera::kernels::cuda {

const AttendVariant kAttendFp32Dim256[1] = {FmaVariant<256>()};
const AttendVariant kAttendFp32Dim256Words[1] = {FmaVariant<256, true>()};

}  // namespace tessera::kernels::cuda
