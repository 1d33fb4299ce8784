#include "kernels/cuda/attend_kernels.cuh"

namespace tessera::kernels::cuda {

const AttendVariant kAttendFp32Dim128[1] = {FmaVariant<128>()};
const AttendVariant kAttendFp32Dim128Words[1] = {FmaVariant<128, true>()};

}  // namespace tessera::kernels::cuda
