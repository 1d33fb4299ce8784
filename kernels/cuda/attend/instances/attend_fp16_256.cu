#include "kernels/cuda/attend/attend_kernels.cuh"

namespace tessera::kernels::cuda {

const AttendVariant kAttendFp16Dim256[2] = {MmaVariant<ElementType::kFp16, 256, 1>(),
                                            MmaVariant<ElementType::kFp16, 256, 2>()};
const AttendVariant kAttendFp16Dim256Words[2] = {MmaVariant<ElementType::kFp16, 256, 1, true>(),
                                                 MmaVariant<ElementType::kFp16, 256, 2, true>()};
const AttendVariant kAttendFp16Dim256Selected[2] = {
    SelectedMmaVariant<ElementType::kFp16, 256, 1>(),
    SelectedMmaVariant<ElementType::kFp16, 256, 2>()};

}  // namespace tessera::kernels::cuda
