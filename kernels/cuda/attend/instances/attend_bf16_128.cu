#include "kernels/cuda/attend/attend_kernels.cuh"

namespace tessera::kernels::cuda {

const AttendVariant kAttendBf16Dim128[2] = {MmaVariant<ElementType::kBf16, 128, 1>(),
                                            MmaVariant<ElementType::kBf16, 128, 2>()};
const AttendVariant kAttendBf16Dim128Words[2] = {MmaVariant<ElementType::kBf16, 128, 1, true>(),
                                                 MmaVariant<ElementType::kBf16, 128, 2, true>()};
const AttendVariant kAttendBf16Dim128Selected[2] = {
    SelectedMmaVariant<ElementType::kBf16, 128, 1>(),
    SelectedMmaVariant<ElementType::kBf16, 128, 2>()};

}  // namespace tessera::kernels::cuda
