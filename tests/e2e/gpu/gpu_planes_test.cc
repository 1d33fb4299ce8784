// Lanes in planes on an emulated GPU: the daemon codes rows in memory that it cannot read directly,
// and the worker's kernels attend over the result.
#include <string>

#include "gmock/gmock.h"
#include "tests/e2e/gpu/emulated_gpu.h"
#include "tests/e2e/planes_lanes.h"

namespace tessera {
namespace {

class PlanesOnGpu : protected WithEmulatedGpu, public PlanesLanes {
 protected:
  PlanesOnGpu() : PlanesLanes(gpu.StartDaemon({"--device=cuda:0"}), &gpu.platform) {}
};

TEST_F(PlanesOnGpu, StayNearDenseThroughALife) { Live(); }

// The floor is more than the lanes hold: every quad is chosen by its signs, and read.
TEST_F(PlanesOnGpu, AreChosenBySignsThroughALife) {
  policy_ += "+signs:choice=call";
  Live();
}

TEST_F(PlanesOnGpu, QueriesOfACallMustShareAChoice) {
  const auto refused = mapped_->CreateSequence(model_, "planes+signs");
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(refused.status().message()), testing::HasSubstr("choice=call"));
}

}  // namespace
}  // namespace tessera
