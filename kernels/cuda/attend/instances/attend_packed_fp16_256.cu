#include "kernels/cuda/attend/attend_packed_kernels.cuh"

namespace tessera::kernels::cuda {

const AttendVariant kAttendPackedFp16Dim256[1] = {PackedVariant<ValueType::kFp16, 256, 1>()};
const AttendVariant kAttendPackedFp16Dim256Selected[1] = {
    SelectedPackedVariant<ValueType::kFp16, 256, 1>()};

}  // namespace tessera::kernels::cuda
