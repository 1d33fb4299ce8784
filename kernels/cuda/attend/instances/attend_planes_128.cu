#include "kernels/cuda/attend/attend_planes_kernels.cuh"

namespace tessera::kernels::cuda {

const AttendVariant kAttendPlanesDim128[2] = {PlanesVariant<128, 1, PartKind::kPlanes>(),
                                              PlanesVariant<128, 2, PartKind::kPlanes>()};
const AttendVariant kAttendNearPlanesDim128[2] = {PlanesVariant<128, 1, PartKind::kNearPlanes>(),
                                                  PlanesVariant<128, 2, PartKind::kNearPlanes>()};

}  // namespace tessera::kernels::cuda
