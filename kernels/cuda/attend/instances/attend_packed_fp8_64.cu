#include "kernels/cuda/attend/attend_packed_kernels.cuh"

namespace tessera::kernels::cuda {

const AttendVariant kAttendPackedFp8Dim64[2] = {PackedVariant<ValueType::kFp8, 64, 1>(),
                                                PackedVariant<ValueType::kFp8, 64, 2>()};
const AttendVariant kAttendPackedFp8Dim64Selected[2] = {
    SelectedPackedVariant<ValueType::kFp8, 64, 1>(),
    SelectedPackedVariant<ValueType::kFp8, 64, 2>()};

}  // namespace tessera::kernels::cuda
