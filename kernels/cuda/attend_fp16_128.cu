#include "kernels/cuda/attend_kernels.cuh"

namespace tessera::kernels::cuda {

const AttendVariant kAttendFp16Dim128[2] = {MmaVariant<ElementType::kFp16, 128, 1>(),
                                            MmaVariant<ElementType::kFp16, 128, 2>()};

}  // namespace tessera::kernels::cuda
