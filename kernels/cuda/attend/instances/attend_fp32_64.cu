#include "kernels/cuda/attend/attend_kernels.cuh"

namespace tessera::kernels::cuda {

const AttendVariant kAttendFp32Dim64[1] = {FmaVariant<64>()};
const AttendVariant kAttendFp32Dim64Words[1] = {FmaVariant<64, true>()};
const AttendVariant kAttendFp32Dim64Selected[1] = {SelectedFmaVariant<64>()};

}  // namespace tessera::kernels::cuda
