#include "kernels/cuda/attend/attend_packed_kernels.cuh"

namespace tessera::kernels::cuda {

const AttendVariant kAttendPackedFp8Dim256[1] = {PackedVariant<ValueType::kFp8, 256, 1>()};
const AttendVariant kAttendPackedFp8Dim256Selected[1] = {
    SelectedPackedVariant<ValueType::kFp8, 256, 1>()};

}  // namespace tessera::kernels::cuda
