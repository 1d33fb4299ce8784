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
  static std::vector<std::uint16_t> Rows(std::span<const std::uint16_t> rows) {
    return {rows.begin(), rows.end()};
  }
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

// A rule per layer, of kv heads, of query heads and none: each is honoured, and the sequences of a
// step are not mixed up.
TEST_F(SelectionsOnGpu, LayersOfOneStepMayHaveOtherRules) {
  shape_.layers = 4;
  shape_.query_heads = 3 * shape_.kv_heads;
  model_ = *mapped_->RegisterModel(shape_.Geometry());
  const std::optional<SelectionRule> rules[] = {
      SelectionRule{.entries = 8}, SelectionRule{.entries = 12, .each_head = true}, std::nullopt,
      SelectionRule{.entries = 60, .each_head = true}};
  client::Sequence sequences[] = {NewSequence(*mapped_), NewSequence(*mapped_)};
  SyntheticSequence truths[] = {{shape_, random_.Bits()}, {shape_, random_.Bits()}};
  const Packing means = {.summary = Summary::kMean, .block = 4, .dense = true};
  for (int i = 0; i < 2; ++i) {
    Append(sequences[i], truths[i], 200);
    ASSERT_TRUE(Compress(sequences[i], means, {}));
  }
  client::Sequence* const batch[] = {&sequences[0], &sequences[1]};
  for (std::uint64_t at = 200; at < 203; ++at) {
    for (SyntheticSequence& truth : truths) truth.Grow(1);
    auto step = mapped_->BeginStep(batch);
    ASSERT_TRUE(step.ok()) << step.status();
    std::vector<Output> outputs;
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      const auto both = [&](const auto& of) {
        auto rows = of(truths[0]);
        const auto more = of(truths[1]);
        rows.insert(rows.end(), more.begin(), more.end());
        return rows;
      };
      const auto key = both([&](auto& truth) { return Rows(truth.Key(layer, at, 1)); });
      const auto value = both([&](auto& truth) { return Rows(truth.Value(layer, at, 1)); });
      const auto query = both([&](auto& truth) { return truth.Query(layer, at); });
      outputs.push_back(NewOutput(2));
      const absl::Status status =
          step->AppendAndAttend(layer, {.key = BytesOf(key),
                                        .value = BytesOf(value),
                                        .query = BytesOf(query),
                                        .output = WritableBytesOf(outputs[layer].output),
                                        .lse = outputs[layer].lse,
                                        .selection = rules[layer]});
      ASSERT_TRUE(status.ok()) << status;
    }
    ASSERT_TRUE(step->End().ok());
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      Output expected;
      for (int i = 0; i < 2; ++i) {
        const Output one = ByRpc(*mapped_, sequences[i], truths[i], layer, at, rules[layer]);
        expected.output.insert(expected.output.end(), one.output.begin(), one.output.end());
        expected.lse.insert(expected.lse.end(), one.lse.begin(), one.lse.end());
        // 8 of 200 entries are not all of them, nor one choice what three heads choose.
        const auto other = layer == 1 ? std::optional(SelectionRule{.entries = 12}) : std::nullopt;
        if (layer > 1) continue;
        EXPECT_FALSE(one == ByRpc(*mapped_, sequences[i], truths[i], layer, at, other)) << layer;
      }
      EXPECT_TRUE(outputs[layer] == expected) << "layer " << layer << ", token " << at;
    }
  }
}

}  // namespace
}  // namespace tessera
