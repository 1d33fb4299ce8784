#include "kernels/cuda/attend/attend_planes_selected_kernels.cuh"

namespace tessera::kernels::cuda {

const AttendVariant kAttendPlanesDim128Selected[2] = {
    SelectedPlanesVariant<128, 1, PartKind::kPlanes>(),
    SelectedPlanesVariant<128, 2, PartKind::kPlanes>()};
const AttendVariant kAttendNearPlanesDim128Selected[2] = {
    SelectedPlanesVariant<128, 1, PartKind::kNearPlanes>(),
    SelectedPlanesVariant<128, 2, PartKind::kNearPlanes>()};

}  // namespace tessera::kernels::cuda
