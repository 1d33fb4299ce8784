#include "kernels/cuda/attend_kernels.cuh"

namespace tessera::kernels::cuda {

const AttendVariant kAttendBf16Dim256[2] = {MmaVariant<ElementType::kBf16, 256, 1>(),
                                            MmaVariant<ElementType::kBf16, 256, 2>()};

}  // namespace tessera::kernels::cuda
