#include "kernels/cuda/attend/attend_kernels.cuh"

namespace tessera::kernels::cuda {

const AttendVariant kAttendFp16Dim128[2] = {MmaVariant<ElementType::kFp16, 128, 1>(),
                                            MmaVariant<ElementType::kFp16, 128, 2>()};
const AttendVariant kAttendFp16Dim128Words[2] = {MmaVariant<ElementType::kFp16, 128, 1, true>(),
                                                 MmaVariant<ElementType::kFp16, 128, 2, true>()};
const AttendVariant kAttendFp16Dim128Selected[2] = {
    SelectedMmaVariant<ElementType::kFp16, 128, 1>(),
    SelectedMmaVariant<ElementType::kFp16, 128, 2>()};

}  // namespace tessera::kernels::cuda
