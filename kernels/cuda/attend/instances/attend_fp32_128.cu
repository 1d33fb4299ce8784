#include "kernels/cuda/attend/attend_kernels.cuh"

namespace tessera::kernels::cuda {

const AttendVariant kAttendFp32Dim128[1] = {FmaVariant<128>()};
const AttendVariant kAttendFp32Dim128Words[1] = {FmaVariant<128, true>()};
const AttendVariant kAttendFp32Dim128Selected[1] = {SelectedFmaVariant<128>()};

}  // namespace tessera::kernels::cuda
