#include "kernels/cuda/attend/attend_packed_kernels.cuh"

namespace tessera::kernels::cuda {

const AttendVariant kAttendPackedBf16Dim256[1] = {PackedVariant<ValueType::kBf16, 256, 1>()};
const AttendVariant kAttendPackedBf16Dim256Selected[1] = {
    SelectedPackedVariant<ValueType::kBf16, 256, 1>()};

}  // namespace tessera::kernels::cuda
