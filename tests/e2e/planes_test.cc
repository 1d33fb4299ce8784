// Lanes in planes on the CPU. tests/e2e/gpu has the same on an emulated GPU.
#include "tests/e2e/planes_lanes.h"

namespace tessera {
namespace {

class PlanesOnCpu : public PlanesLanes {};

TEST_F(PlanesOnCpu, StayNearDenseThroughALife) { Live(); }

}  // namespace
}  // namespace tessera
