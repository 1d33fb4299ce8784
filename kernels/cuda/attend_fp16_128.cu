#include "kernels/cuda/attend_kernels.cuh"

namespace tessera::kernels::cuda {

const AttendVariant kAttendFp16Dim128[2] = {MmaVariant<ElementType::kFp16, 128, 1>(),
                                            MmaVariant<ElementType::kFp16, 128, 2>()};
const AttendVariant kAttendFp16Dim128Words[2] = {MmaVariant<ElementType::kFp16, 128, 1, true>(),
                                                 MmaVariant<ElementType::kFp16, 128, 2, true>()};

}  // namespace tessera::kernels::cuda
