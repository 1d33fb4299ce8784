#include "kernels/cuda/attend/attend_packed_kernels.cuh"

namespace tessera::kernels::cuda {

const AttendVariant kAttendPackedFp16Dim128[2] = {PackedVariant<ValueType::kFp16, 128, 1>(),
                                                  PackedVariant<ValueType::kFp16, 128, 2>()};
const AttendVariant kAttendPackedFp16Dim128Selected[2] = {
    SelectedPackedVariant<ValueType::kFp16, 128, 1>(),
    SelectedPackedVariant<ValueType::kFp16, 128, 2>()};

}  // namespace tessera::kernels::cuda
