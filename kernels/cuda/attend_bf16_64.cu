#include "kernels/cuda/attend_kernels.cuh"

namespace tessera::kernels::cuda {

const AttendVariant kAttendBf16Dim64[2] = {MmaVariant<ElementType::kBf16, 64, 1>(),
                                           MmaVariant<ElementType::kBf16, 64, 2>()};

}  // namespace tessera::kernels::cuda
