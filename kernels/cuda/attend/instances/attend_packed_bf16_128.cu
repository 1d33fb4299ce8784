#include "kernels/cuda/attend/attend_packed_kernels.cuh"

namespace tessera::kernels::cuda {

const AttendVariant kAttendPackedBf16Dim128[2] = {PackedVariant<ValueType::kBf16, 128, 1>(),
                                                  PackedVariant<ValueType::kBf16, 128, 2>()};
const AttendVariant kAttendPackedBf16Dim128Selected[2] = {
    SelectedPackedVariant<ValueType::kBf16, 128, 1>(),
    SelectedPackedVariant<ValueType::kBf16, 128, 2>()};

}  // namespace tessera::kernels::cuda
