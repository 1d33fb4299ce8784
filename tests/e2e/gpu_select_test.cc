// Selections on a GPU, end to end, with a GPU that is emulated: the worker's own kernels and the
// daemon's choose and read the same.

#include <gmock/gmock.h>

#include <memory>
#include <vector>

#include "tests/e2e/emulated_gpu.h"
#include "tests/e2e/packed_lanes.h"

namespace tessera {
namespace {

// Before the workers, so that it outlives them.
struct WithEmulatedGpu {
  EmulatedGpu gpu{true};
};

class SelectionsOnGpu : protected WithEmulatedGpu, public PackedLanes {
 protected:
  SelectionsOnGpu() : PackedLanes(gpu.StartDaemon({"--device=cuda:0"}), &gpu.platform) {}
};

// Steps with a rule, with another and with none, over packed segments and dense ones: each output
// is the daemon's, to the bit.
TEST_F(SelectionsOnGpu, BothDoorsGiveTheSameBits) {
  client::Sequence sequence = NewSequence(*mapped_);
  SyntheticSequence truth(shape_, random_.Bits());
  for (int part = 0; part < 2; ++part) {
    Append(sequence, truth, random_.Between(30, 150));
    Rotated rotated;
    ASSERT_TRUE(Compress(sequence, RandomPacking(&rotated), rotated));
  }
  Append(sequence, truth, 64);
  const Packing means = {.summary = Summary::kMean, .block = 8, .dense = true};
  ASSERT_TRUE(Compress(sequence, means, {}));
  for (int step = 0; step < 5; ++step) {
    std::optional<SelectionRule> rule;
    if (step != 2) rule = RandomRule();
    const std::vector<Output> by_step = Decode(*mapped_, sequence, truth, rule);
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      const Output by_rpc = ByRpc(*mapped_, sequence, truth, layer, truth.tokens() - 1, rule);
      ASSERT_TRUE(by_step[layer] == by_rpc) << "step " << step << " layer " << layer;
    }
  }
}

// A rule per layer: each is honoured.
TEST_F(SelectionsOnGpu, LayersOfOneStepMayHaveOtherRules) {
  client::Sequence sequence = NewSequence(*mapped_);
  SyntheticSequence truth(shape_, random_.Bits());
  Append(sequence, truth, 200);
  const Packing means = {.summary = Summary::kMean, .block = 4, .dense = true};
  ASSERT_TRUE(Compress(sequence, means, {}));
  truth.Grow(1);
  client::Sequence* const batch[] = {&sequence};
  auto step = mapped_->BeginStep(batch);
  ASSERT_TRUE(step.ok()) << step.status();
  std::vector<Output> outputs;
  for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
    std::optional<SelectionRule> rule;
    if (layer % 2 == 0) rule = {.entries = 8 + 40 * layer, .each_head = layer == 2};
    const auto query = truth.Query(layer, 200);
    outputs.push_back(NewOutput());
    const absl::Status status =
        step->AppendAndAttend(layer, {.key = BytesOf(truth.Key(layer, 200, 1)),
                                      .value = BytesOf(truth.Value(layer, 200, 1)),
                                      .query = BytesOf(query),
                                      .output = WritableBytesOf(outputs[layer].output),
                                      .lse = outputs[layer].lse,
                                      .selection = rule});
    ASSERT_TRUE(status.ok()) << status;
  }
  ASSERT_TRUE(step->End().ok());
  for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
    std::optional<SelectionRule> rule;
    if (layer % 2 == 0) rule = {.entries = 8 + 40 * layer, .each_head = layer == 2};
    EXPECT_TRUE(outputs[layer] == ByRpc(*mapped_, sequence, truth, layer, 200, rule)) << layer;
    // 8 of 200 entries are not all of them.
    const std::optional<SelectionRule> none;
    if (layer == 0) {
      EXPECT_FALSE(outputs[0] == ByRpc(*mapped_, sequence, truth, 0, 200, none));
    }
  }
}

}  // namespace
}  // namespace tessera
