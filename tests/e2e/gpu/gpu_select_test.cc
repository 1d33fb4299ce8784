// Selections end to end on an emulated GPU: the worker's kernels and the daemon's kernels select
// and read the same.

#include <gmock/gmock.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "tests/e2e/gpu/emulated_gpu.h"
#include "tests/e2e/packed_lanes.h"

namespace tessera {
namespace {

class SelectionsOnGpu : protected WithEmulatedGpu, public PackedLanes {
 protected:
  static std::vector<std::uint16_t> Rows(std::span<const std::uint16_t> rows) {
    return {rows.begin(), rows.end()};
  }
  SelectionsOnGpu() : PackedLanes(gpu.StartDaemon({"--device=cuda:0"}), &gpu.platform) {}
};

// Steps with one rule, another rule and none, over packed and dense segments. Each output equals
// the daemon's bit by bit.
TEST_F(SelectionsOnGpu, BothTransportsGiveTheSameBits) {
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

// Reads with several shapes of queries in turn, before the sequence has tail rings and after.
TEST_F(SelectionsOnGpu, ReadsHaveTheBitsOfTheDaemonsAnswer) {
  const std::uint32_t layer = shape_.layers - 1;
  client::Sequence sequence = NewSequence(*mapped_);
  SyntheticSequence truth(shape_, random_.Bits());
  Append(sequence, truth, 150);
  Rotated rotated;
  ASSERT_TRUE(Compress(sequence, RandomPacking(&rotated), rotated));
  const Packing means = {.summary = Summary::kMean, .block = 8, .dense = true};
  Append(sequence, truth, 64);
  ASSERT_TRUE(Compress(sequence, means, {}));
  for (int round = 0; round < 2; ++round) {
    client::Sequence* const batch[] = {&sequence};
    auto read = mapped_->BeginRead(batch);
    ASSERT_TRUE(read.ok()) << read.status();
    std::vector<std::vector<float>> here;
    std::vector<std::vector<std::uint16_t>> asked;
    std::vector<std::optional<SelectionRule>> rules;
    for (const std::uint32_t queries : {1u, 40u, 3u, 3u, 1u}) {
      std::vector<std::uint16_t> rows;
      for (std::uint32_t i = 0; i < queries; ++i) {
        const auto row = truth.Query(layer, random_.Below(truth.tokens()));
        rows.insert(rows.end(), row.begin(), row.end());
      }
      rules.push_back(random_.OneIn(2) ? std::optional(RandomRule()) : std::nullopt);
      here.emplace_back(rows.size());
      const absl::Status attended =
          read->Attend(layer, {.queries = queries,
                               .queries_each = {},
                               .first_query_positions = {},
                               .query = std::as_bytes(std::span(rows)),
                               .output = std::as_writable_bytes(std::span(here.back())),
                               .lse = {},
                               .selection = rules.back()});
      ASSERT_TRUE(attended.ok()) << attended;
      asked.push_back(std::move(rows));
    }
    ASSERT_TRUE(read->End().ok());
    for (std::size_t i = 0; i < asked.size(); ++i) {
      std::vector<float> there(asked[i].size());
      const client::AttendQuery query = {
          .sequence = &sequence,
          .queries = static_cast<std::uint32_t>(asked[i].size() / shape_.query_row()),
          .query = std::as_bytes(std::span(asked[i])),
          .output = std::as_writable_bytes(std::span(there)),
          .lse = {},
          .first_query_position = {}};
      ASSERT_TRUE(mapped_->AttendRpc(layer, {&query, 1}, {.selection = rules[i]}).ok());
      EXPECT_TRUE(here[i] == there) << "call " << i << " of round " << round;
    }
    (void)Decode(*mapped_, sequence, truth, std::nullopt);  // opens the tail rings
  }
}

// Each layer has another rule (per kv head, per query head, none). Each must be applied, without
// mixing up the sequences of a step.
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
        // 8 of 200 entries must differ from all, and a shared selection from that of three heads.
        const auto other = layer == 1 ? std::optional(SelectionRule{.entries = 12}) : std::nullopt;
        if (layer > 1) continue;
        EXPECT_FALSE(one == ByRpc(*mapped_, sequences[i], truths[i], layer, at, other)) << layer;
      }
      EXPECT_TRUE(outputs[layer] == expected) << "layer " << layer << ", token " << at;
    }
  }
}

// Sequences of one step have different policies, one without a selection. Each reads the same as
// the daemon does. Selections per query head and per kv head cannot share a step.
TEST_F(SelectionsOnGpu, SequencesOfOneStepMayHaveOtherRules) {
  shape_.query_heads = 3 * shape_.kv_heads;
  model_ = *mapped_->RegisterModel(shape_.Geometry());
  const std::string policies[] = {"select:rate=0.3", "", "select:entries=40",
                                  "select:entries=24,heads=each"};
  std::vector<client::Sequence> sequences;
  std::vector<SyntheticSequence> truths;
  const Packing bounds = {.summary = Summary::kMinMax, .block = 4, .dense = true};
  for (const std::string& policy : policies) {
    auto sequence = mapped_->CreateSequence(model_, policy);
    ASSERT_TRUE(sequence.ok()) << sequence.status();
    sequences.push_back(*std::move(sequence));
    truths.emplace_back(shape_, random_.Bits());
    Append(sequences.back(), truths.back(), 200);
    ASSERT_TRUE(Compress(sequences.back(), bounds, {}));
  }
  const auto step_of = [&](std::vector<std::size_t> members, std::vector<Output>& outputs) {
    std::vector<client::Sequence*> batch;
    for (const std::size_t i : members) batch.push_back(&sequences[i]);
    for (const std::size_t i : members) truths[i].Grow(1);
    const auto all = [&](const auto& of) {
      std::vector<std::uint16_t> rows;
      for (const std::size_t i : members) {
        const auto more = of(truths[i], truths[i].tokens() - 1);
        rows.insert(rows.end(), more.begin(), more.end());
      }
      return rows;
    };
    auto step = mapped_->BeginStep(batch);
    if (!step.ok()) return step.status();
    absl::Status status;
    for (std::uint32_t layer = 0; layer < shape_.layers && status.ok(); ++layer) {
      const auto key = all([&](auto& truth, auto at) { return Rows(truth.Key(layer, at, 1)); });
      const auto value = all([&](auto& truth, auto at) { return Rows(truth.Value(layer, at, 1)); });
      const auto query = all([&](auto& truth, auto at) { return truth.Query(layer, at); });
      outputs.push_back(NewOutput(static_cast<std::uint32_t>(members.size())));
      status = step->AppendAndAttend(layer, {.key = BytesOf(key),
                                             .value = BytesOf(value),
                                             .query = BytesOf(query),
                                             .output = WritableBytesOf(outputs[layer].output),
                                             .lse = outputs[layer].lse});
    }
    return status.ok() ? step->End() : status;
  };
  // Changes the members of the step and their order.
  for (const std::vector<std::size_t>& members :
       {std::vector<std::size_t>{0, 1, 2}, {2, 1, 0}, {1, 3}, {3}, {1, 2}}) {
    std::vector<Output> outputs;
    const absl::Status status = step_of(members, outputs);
    ASSERT_TRUE(status.ok()) << status;
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      Output expected;
      for (const std::size_t i : members) {
        const Output one =
            ByRpc(*mapped_, sequences[i], truths[i], layer, truths[i].tokens() - 1, {});
        expected.output.insert(expected.output.end(), one.output.begin(), one.output.end());
        expected.lse.insert(expected.lse.end(), one.lse.begin(), one.lse.end());
      }
      if (std::ranges::count(members, 3u) == 0 || members.size() == 1) {
        EXPECT_TRUE(outputs[layer] == expected) << "layer " << layer;
        continue;
      }
      // Per-query-head lanes read the parts of a sequence in another order.
      for (std::size_t e = 0; e < expected.output.size(); ++e) {
        ASSERT_NEAR(outputs[layer].output[e], expected.output[e], 1e-2) << "layer " << layer;
      }
    }
  }
  std::vector<Output> outputs;
  const absl::Status status = step_of({0, 3}, outputs);
  EXPECT_TRUE(absl::IsUnimplemented(status)) << status;
  EXPECT_THAT(status.ToString(), testing::HasSubstr("for each query head"));
}

}  // namespace
}  // namespace tessera
