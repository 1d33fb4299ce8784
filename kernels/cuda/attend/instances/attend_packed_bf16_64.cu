#include "kernels/cuda/attend/attend_packed_kernels.cuh"

namespace tessera::kernels::cuda {

const AttendVariant kAttendPackedBf16Dim64[2] = {PackedVariant<ValueType::kBf16, 64, 1>(),
                                                 PackedVariant<ValueType::kBf16, 64, 2>()};
const AttendVariant kAttendPackedBf16Dim64Selected[2] = {
    SelectedPackedVariant<ValueType::kBf16, 64, 1>(),
    SelectedPackedVariant<ValueType::kBf16, 64, 2>()};

}  // namespace tessera::kernels::cuda
