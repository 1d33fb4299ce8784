// The CUDA kernels as subjects of the suite of packed tiles: on a real GPU if there is one, and
// always on the emulated GPU.
#include <memory>
#include <vector>

#include "kernels/cuda/common/error_bound.h"
#include "kernels/cuda/encode/tile_ops_params.h"
#include "tests/contract/pack/device_operations.h"
#include "tests/contract/pack/pack_conformance.h"
#include "tests/contract/pack/pack_planes.h"

namespace tessera::kernels {
namespace {

std::vector<PackSubjectPtr> Subjects() {
  const PackSubject bounds = {.rotation_error = cuda::kRotationError,
                              .shares = cuda::kObserveErrorBound,
                              .products = {.per_logit_mass = kObservedProductError}};
  PackSubject real = bounds;
  real.name = "cuda";
  real.operations = &RealTileOperations();
  real.supported = RealTileDevice().runtime != nullptr;
  real.reason = RealTileDevice().reason;
  PackSubject emulated = bounds;
  emulated.name = "cuda_emulated";
  emulated.operations = &EmulatedTileOperations();
  emulated.rounds_divisor = 3;
  return {std::make_shared<PackSubject>(std::move(real)),
          std::make_shared<PackSubject>(std::move(emulated))};
}

INSTANTIATE_TEST_SUITE_P(Cuda, PackConformance, testing::ValuesIn(Subjects()), PackSubjectName);

}  // namespace

std::vector<PackSubjectPtr> PlanesSubjects() { return Subjects(); }

}  // namespace tessera::kernels
