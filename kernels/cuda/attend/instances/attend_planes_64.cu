#include "kernels/cuda/attend/attend_planes_kernels.cuh"

namespace tessera::kernels::cuda {

const AttendVariant kAttendPlanesDim64[2] = {PlanesVariant<64, 1, PartKind::kPlanes>(),
                                             PlanesVariant<64, 2, PartKind::kPlanes>()};
const AttendVariant kAttendNearPlanesDim64[2] = {PlanesVariant<64, 1, PartKind::kNearPlanes>(),
                                                 PlanesVariant<64, 2, PartKind::kNearPlanes>()};

}  // namespace tessera::kernels::cuda
