#include "kernels/cuda/attend/attend_planes_selected_kernels.cuh"

namespace tessera::kernels::cuda {

const AttendVariant kAttendPlanesDim64Selected[2] = {
    SelectedPlanesVariant<64, 1, PartKind::kPlanes>(),
    SelectedPlanesVariant<64, 2, PartKind::kPlanes>()};
const AttendVariant kAttendNearPlanesDim64Selected[2] = {
    SelectedPlanesVariant<64, 1, PartKind::kNearPlanes>(),
    SelectedPlanesVariant<64, 2, PartKind::kNearPlanes>()};

}  // namespace tessera::kernels::cuda
