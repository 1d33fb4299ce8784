#include "kernels/cuda/attend/attend_packed_kernels.cuh"

namespace tessera::kernels::cuda {

const AttendVariant kAttendPackedFp16Dim64[2] = {PackedVariant<ValueType::kFp16, 64, 1>(),
                                                 PackedVariant<ValueType::kFp16, 64, 2>()};
const AttendVariant kAttendPackedFp16Dim64Selected[2] = {
    SelectedPackedVariant<ValueType::kFp16, 64, 1>(),
    SelectedPackedVariant<ValueType::kFp16, 64, 2>()};

}  // namespace tessera::kernels::cuda
