// Lanes in planes on an emulated GPU: the daemon codes rows in memory that it cannot read directly,
// and the worker's kernels attend over the result.
#include "tests/e2e/gpu/emulated_gpu.h"
#include "tests/e2e/planes_lanes.h"

namespace tessera {
namespace {

class PlanesOnGpu : protected WithEmulatedGpu, public PlanesLanes {
 protected:
  PlanesOnGpu() : PlanesLanes(gpu.StartDaemon({"--device=cuda:0"}), &gpu.platform) {}
};

TEST_F(PlanesOnGpu, StayNearDenseThroughALife) { Live(); }

}  // namespace
}  // namespace tessera
