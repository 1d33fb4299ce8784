#include "kernels/cuda/attend/attend_planes_kernels.cuh"

namespace tessera::kernels::cuda {

const AttendVariant kAttendPlanesDim256[1] = {PlanesVariant<256, 1, PartKind::kPlanes>()};
const AttendVariant kAttendNearPlanesDim256[1] = {PlanesVariant<256, 1, PartKind::kNearPlanes>()};

}  // namespace tessera::kernels::cuda
