#include "kernels/cuda/attend/attend_kernels.cuh"

namespace tessera::kernels::cuda {

const AttendVariant kAttendBf16Dim64[2] = {MmaVariant<ElementType::kBf16, 64, 1>(),
                                           MmaVariant<ElementType::kBf16, 64, 2>()};
const AttendVariant kAttendBf16Dim64Words[2] = {MmaVariant<ElementType::kBf16, 64, 1, true>(),
                                                MmaVariant<ElementType::kBf16, 64, 2, true>()};
const AttendVariant kAttendBf16Dim64Selected[2] = {SelectedMmaVariant<ElementType::kBf16, 64, 1>(),
                                                   SelectedMmaVariant<ElementType::kBf16, 64, 2>()};

}  // namespace tessera::kernels::cuda
