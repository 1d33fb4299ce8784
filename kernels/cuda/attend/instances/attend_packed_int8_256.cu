#include "kernels/cuda/attend/attend_packed_kernels.cuh"

namespace tessera::kernels::cuda {

const AttendVariant kAttendPackedInt8Dim256[1] = {PackedVariant<ValueType::kInt8, 256, 1>()};
const AttendVariant kAttendPackedInt8Dim256Selected[1] = {
    SelectedPackedVariant<ValueType::kInt8, 256, 1>()};

}  // namespace tessera::kernels::cuda
