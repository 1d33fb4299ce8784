#include "kernels/cuda/attend/attend_kernels.cuh"

namespace tessera::kernels::cuda {

const AttendVariant kAttendBf16Dim256[2] = {MmaVariant<ElementType::kBf16, 256, 1>(),
                                            MmaVariant<ElementType::kBf16, 256, 2>()};
const AttendVariant kAttendBf16Dim256Words[2] = {MmaVariant<ElementType::kBf16, 256, 1, true>(),
                                                 MmaVariant<ElementType::kBf16, 256, 2, true>()};
const AttendVariant kAttendBf16Dim256Selected[2] = {
    SelectedMmaVariant<ElementType::kBf16, 256, 1>(),
    SelectedMmaVariant<ElementType::kBf16, 256, 2>()};

}  // namespace tessera::kernels::cuda
