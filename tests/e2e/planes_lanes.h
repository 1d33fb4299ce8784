// Lanes in planes end to end: the daemon codes rows while workers append and decode, and both
// transports attend over the result.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/e2e/packed_lanes.h"

namespace tessera {

class PlanesLanes : public PackedLanes {
 protected:
  using PackedLanes::PackedLanes;

  client::Sequence Coded(SyntheticSequence& truth, std::uint64_t tokens) {
    auto sequence = mapped_->CreateSequence(model_, policy_);
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    Append(*sequence, truth, tokens);
    const auto compressed = sequence->Compress();
    EXPECT_TRUE(compressed.ok()) << compressed.status();
    return *std::move(sequence);
  }
  // Both transports give the same bits for the newest token, and nearly those of dense rows.
  void Check(client::Sequence& sequence, client::Sequence& dense, SyntheticSequence& truth) {
    SyntheticSequence same = truth;
    const auto settled = sequence.Compress();  // full tiles of earlier steps are coded now
    ASSERT_TRUE(settled.ok()) << settled.status();
    const std::uint64_t coded = CodedEntries(sequence);
    const std::vector<Output> by_step = Decode(*mapped_, sequence, truth, std::nullopt);
    const std::vector<Output> exact = Decode(*mapped_, dense, same, std::nullopt);
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      const Output by_rpc =
          ByRpc(*mapped_, sequence, truth, layer, truth.tokens() - 1, std::nullopt);
      // Unless the step has filled a tile, which is coded meanwhile.
      ASSERT_TRUE(by_step[layer] == by_rpc || CodedEntries(sequence) != coded)
          << "layer " << layer << ", " << truth.tokens();
      double error = 0;
      double energy = 0;
      for (std::size_t i = 0; i < by_rpc.output.size(); ++i) {
        const double difference = by_rpc.output[i] - exact[layer].output[i];
        error += difference * difference;
        energy += exact[layer].output[i] * exact[layer].output[i];
      }
      // Random rows lose 1.2 % of the output's energy on average and 2.5 % in the worst of
      // thousands of outputs; codes that are read wrongly lose most of it.
      ASSERT_LE(error, 0.05 * energy) << "layer " << layer << ", " << truth.tokens();
      errors_ += error / energy;
      ++outputs_;
    }
  }
  static std::uint64_t CodedEntries(client::Sequence& sequence) {
    std::uint64_t entries = 0;
    const auto described = sequence.Describe(/*lanes=*/true);
    EXPECT_TRUE(described.ok()) << described.status();
    for (const auto& lane : described->lanes) {
      for (const auto& run : lane.runs) {
        if (run.format.starts_with("planes")) entries += run.entries;
      }
    }
    return entries;
  }

  // A lane's life, compared with dense rows all along: coded while it grows, forked, offloaded and
  // restored.
  void Live() {
    const std::uint64_t seed = random_.Bits();
    SyntheticSequence truth(shape_, seed);
    client::Sequence sequence = Coded(truth, 500);
    EXPECT_GE(CodedEntries(sequence), std::uint64_t{shape_.layers} * shape_.kv_heads * 400);
    client::Sequence dense = NewSequence(*mapped_);
    SyntheticSequence again(shape_, seed);
    Append(dense, again, 500);
    for (int step = 0; step < 70; ++step) ASSERT_NO_FATAL_FAILURE(Check(sequence, dense, truth));
    EXPECT_LE(errors_, 0.02 * outputs_);
    const auto settled = sequence.Compress();
    ASSERT_TRUE(settled.ok()) << settled.status();
    // A fork reads the same segments; a restored sequence has the same bits.
    auto fork = sequence.Fork();
    ASSERT_TRUE(fork.ok()) << fork.status();
    const Output before = ByRpc(*mapped_, sequence, truth, 0, truth.tokens() - 1, std::nullopt);
    EXPECT_TRUE(before == ByRpc(*mapped_, *fork, truth, 0, truth.tokens() - 1, std::nullopt));
    ASSERT_TRUE(fork->Free().ok());
    const auto offloaded = sequence.Offload();
    ASSERT_TRUE(offloaded.ok()) << offloaded.status();
    const absl::Status restored = sequence.Restore();
    ASSERT_TRUE(restored.ok()) << restored;
    EXPECT_TRUE(before == ByRpc(*mapped_, sequence, truth, 0, truth.tokens() - 1, std::nullopt));
  }

  std::string policy_ = "planes:book_rows=256,recent=32";
  double errors_ = 0;  // sum over outputs of the share of their energy that is lost
  int outputs_ = 0;
};

}  // namespace tessera
