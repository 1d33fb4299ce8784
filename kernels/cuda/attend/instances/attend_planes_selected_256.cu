#include "kernels/cuda/attend/attend_planes_selected_kernels.cuh"

namespace tessera::kernels::cuda {

const AttendVariant kAttendPlanesDim256Selected[1] = {
    SelectedPlanesVariant<256, 1, PartKind::kPlanes>()};
const AttendVariant kAttendNearPlanesDim256Selected[1] = {
    SelectedPlanesVariant<256, 1, PartKind::kNearPlanes>()};

}  // namespace tessera::kernels::cuda
