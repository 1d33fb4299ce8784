#include "kernels/cuda/attend/attend_kernels.cuh"

namespace tessera::kernels::cuda {

const AttendVariant kAttendFp32Dim256[1] = {FmaVariant<256>()};
const AttendVariant kAttendFp32Dim256Words[1] = {FmaVariant<256, true>()};
const AttendVariant kAttendFp32Dim256Selected[1] = {SelectedFmaVariant<256>()};

}  // namespace tessera::kernels::cuda
