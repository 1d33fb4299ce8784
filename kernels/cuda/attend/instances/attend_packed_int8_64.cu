#include "kernels/cuda/attend/attend_packed_kernels.cuh"

namespace tessera::kernels::cuda {

const AttendVariant kAttendPackedInt8Dim64[2] = {PackedVariant<ValueType::kInt8, 64, 1>(),
                                                 PackedVariant<ValueType::kInt8, 64, 2>()};
const AttendVariant kAttendPackedInt8Dim64Selected[2] = {
    SelectedPackedVariant<ValueType::kInt8, 64, 1>(),
    SelectedPackedVariant<ValueType::kInt8, 64, 2>()};

}  // namespace tessera::kernels::cuda
