#include "kernels/cuda/attend/attend_kernels.cuh"

namespace tessera::kernels::cuda {

const AttendVariant kAttendFp16Dim64[2] = {MmaVariant<ElementType::kFp16, 64, 1>(),
                                           MmaVariant<ElementType::kFp16, 64, 2>()};
const AttendVariant kAttendFp16Dim64Words[2] = {MmaVariant<ElementType::kFp16, 64, 1, true>(),
                                                MmaVariant<ElementType::kFp16, 64, 2, true>()};
const AttendVariant kAttendFp16Dim64Selected[2] = {SelectedMmaVariant<ElementType::kFp16, 64, 1>(),
                                                   SelectedMmaVariant<ElementType::kFp16, 64, 2>()};

}  // namespace tessera::kernels::cuda
