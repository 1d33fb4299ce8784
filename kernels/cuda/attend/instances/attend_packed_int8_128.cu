#include "kernels/cuda/attend/attend_packed_kernels.cuh"

namespace tessera::kernels::cuda {

const AttendVariant kAttendPackedInt8Dim128[2] = {PackedVariant<ValueType::kInt8, 128, 1>(),
                                                  PackedVariant<ValueType::kInt8, 128, 2>()};
const AttendVariant kAttendPackedInt8Dim128Selected[2] = {
    SelectedPackedVariant<ValueType::kInt8, 128, 1>(),
    SelectedPackedVariant<ValueType::kInt8, 128, 2>()};

}  // namespace tessera::kernels::cuda
