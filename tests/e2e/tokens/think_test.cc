// ThinK end to end: a worker observes its newest queries, keys lose channels, and both transports
// attend over the result, including while decoding.

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "tests/e2e/tokens/token_lanes.h"

namespace tessera {
namespace {

class Think : public Tokens {
 protected:
  // The channels by definition, for a prompt of this many tokens, judged by the queries of its
  // newest 32.
  std::vector<std::uint32_t> Channels(const SyntheticSequence& truth, std::uint32_t layer,
                                      std::uint32_t kv_head, std::uint64_t prompt,
                                      std::uint32_t count) {
    const std::uint32_t dim = shape_.head_dim;
    std::vector<double> keys(dim), queries(dim);
    for (std::uint64_t t = 0; t < prompt; ++t) {
      const auto key = truth.Key(layer, t, 1);
      for (std::uint32_t d = 0; d < dim; ++d) {
        keys[d] += std::pow(kernels::Bf16ToFloat(key[std::size_t{kv_head} * dim + d]), 2);
      }
      if (t + 32 < prompt) continue;
      const auto query = truth.Query(layer, t);
      for (std::uint32_t g = 0; g < shape_.group(); ++g) {
        const std::size_t head = std::size_t{kv_head} * shape_.group() + g;
        for (std::uint32_t d = 0; d < dim; ++d) {
          queries[d] += std::pow(kernels::Bf16ToFloat(query[head * dim + d]), 2);
        }
      }
    }
    std::vector<std::uint32_t> order(dim);
    std::iota(order.begin(), order.end(), 0u);
    std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
      return keys[a] * queries[a] > keys[b] * queries[b];
    });
    order.resize(count);
    std::sort(order.begin(), order.end());
    return order;
  }

  // Dense attention with the dropped channels of keys before `whole_from` set to zero.
  std::vector<double> WithZeros(const SyntheticSequence& truth, std::uint32_t layer,
                                std::uint64_t prompt, std::uint32_t count,
                                std::uint64_t whole_from) {
    const auto query = truth.Query(layer, truth.tokens() - 1);
    const std::uint32_t dim = shape_.head_dim;
    std::vector<double> output(shape_.query_row());
    for (std::uint32_t head = 0; head < shape_.query_heads; ++head) {
      const std::uint32_t kv_head = head / shape_.group();
      const std::vector<std::uint32_t> channels = Channels(truth, layer, kv_head, prompt, count);
      std::vector<double> logits;
      for (std::uint64_t t = 0; t < truth.tokens(); ++t) {
        const auto key = truth.Key(layer, t, 1);
        double dot = 0;
        for (std::uint32_t d = 0; d < dim; ++d) {
          if (t < whole_from && !std::binary_search(channels.begin(), channels.end(), d)) continue;
          dot += static_cast<double>(kernels::Bf16ToFloat(key[std::size_t{kv_head} * dim + d])) *
                 kernels::Bf16ToFloat(query[std::size_t{head} * dim + d]);
        }
        logits.push_back(dot / std::sqrt(dim));
      }
      const double most = *std::max_element(logits.begin(), logits.end());
      double sum = 0;
      for (std::uint64_t t = 0; t < truth.tokens(); ++t) {
        const double share = std::exp(logits[t] - most);
        sum += share;
        const auto value = truth.Value(layer, t, 1);
        for (std::uint32_t d = 0; d < dim; ++d) {
          output[std::size_t{head} * dim + d] +=
              share * kernels::Bf16ToFloat(value[std::size_t{kv_head} * dim + d]);
        }
      }
      for (std::uint32_t d = 0; d < dim; ++d) output[std::size_t{head} * dim + d] /= sum;
    }
    return output;
  }
  void ExpectAttends(client::Sequence& sequence, const SyntheticSequence& truth,
                     std::uint64_t prompt, std::uint32_t count, std::uint64_t whole_from) {
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      const std::vector<double> exact = WithZeros(truth, layer, prompt, count, whole_from);
      const auto query = truth.Query(layer, truth.tokens() - 1);
      for (client::Worker* worker : {mapped_.get(), remote_.get()}) {
        std::vector<float> output(shape_.query_row());
        const client::AttendQuery asked[] = {
            {.sequence = &sequence, .query = BytesOf(query), .output = WritableBytesOf(output)}};
        const absl::Status status = worker->AttendRpc(layer, asked, {});
        ASSERT_TRUE(status.ok()) << status;
        for (std::size_t i = 0; i < output.size(); ++i) {
          ASSERT_NEAR(output[i], exact[i], 0.02) << "layer " << layer << " element " << i;
        }
      }
    }
  }
  // Each kv head attends as if some one channel of its first `cut` keys were zero.
  void ExpectAttendsWithoutOneChannel(client::Sequence& sequence, const SyntheticSequence& truth,
                                      int cut, double tolerance) {
    const v1::DescribeResponse held = Entries(sequence);
    const std::size_t group_row = std::size_t{shape_.group()} * shape_.head_dim;
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      std::vector<std::vector<double>> exact;
      for (std::uint32_t channel = 0; channel < shape_.head_dim; ++channel) {
        exact.push_back(ByDefinition(held, truth, layer, {.entries = cut, .channel = channel}));
      }
      const auto query = truth.Query(layer, truth.tokens() - 1);
      for (client::Worker* worker : {mapped_.get(), remote_.get()}) {
        std::vector<float> output(shape_.query_row());
        const client::AttendQuery asked[] = {
            {.sequence = &sequence, .query = BytesOf(query), .output = WritableBytesOf(output)}};
        const absl::Status status = worker->AttendRpc(layer, asked, {});
        ASSERT_TRUE(status.ok()) << status;
        for (std::uint32_t kv_head = 0; kv_head < shape_.kv_heads; ++kv_head) {
          double least = std::numeric_limits<double>::infinity();
          for (const std::vector<double>& candidate : exact) {
            double worst = 0;
            for (std::size_t i = kv_head * group_row; i < (kv_head + 1) * group_row; ++i) {
              worst = std::max(worst, std::abs(output[i] - candidate[i]));
            }
            least = std::min(least, worst);
          }
          EXPECT_LT(least, tolerance) << "layer " << layer << " kv head " << kv_head;
        }
      }
    }
  }
  // Entries of a lane whose keys lost channels.
  static std::uint64_t CutEntries(const v1::LaneDescription& lane) {
    std::uint64_t entries = 0;
    for (const v1::SegmentRun& run : lane.segment_run()) {
      if (run.kept_channels() != 0) entries += run.entries();
    }
    return entries;
  }
};

TEST_F(Think, KeysLoseChannelsAndDescribeSaysWhatIsLeft) {
  Shape({.layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 128});
  client::Sequence sequence = NewSequence("think");
  SyntheticSequence truth(shape_, random_.Bits());
  Append(sequence, truth, 300);
  Append(sequence, truth, 52);
  const client::CompressResult compressed = Compress(sequence);
  EXPECT_EQ(compressed.entries_dropped, 0u);
  const v1::DescribeResponse held = Entries(sequence);
  EXPECT_EQ(held.tokens(), 352u);
  EXPECT_EQ(held.tokens_kept(), 1);
  // 320 tokens with 77 of 128 key channels, and 32 whole ones.
  EXPECT_DOUBLE_EQ(held.elements_kept(), (320 * (77 + 128) + 32 * 256) / (352.0 * 256));
  const std::uint64_t rotations = 4 * 77 * 128 * 2;
  EXPECT_EQ(held.rotation_bytes(), rotations);
  const std::uint64_t tiles = 4 * (10 * 32 * 410 + 32 * 512);
  EXPECT_EQ(held.tile_bytes(), tiles);
  EXPECT_DOUBLE_EQ(held.bytes_kept(),
                   static_cast<double>(tiles + rotations + held.table_bytes()) / (4 * 352 * 512));
  for (const v1::LaneDescription& lane : held.lane()) {
    ASSERT_EQ(lane.segment_run_size(), 2);
    EXPECT_EQ(lane.segment_run(0).format(), "packed bf16");
    EXPECT_EQ(lane.segment_run(0).entries(), 320u);
    EXPECT_EQ(lane.segment_run(0).kept_channels(), 77u);
    EXPECT_EQ(lane.segment_run(0).value_kept_channels(), 128u);
    EXPECT_EQ(lane.segment_run(0).tile_bytes(), 10u * 32 * 410);
    EXPECT_EQ(lane.segment_run(1).entries(), 32u);
  }
  ExpectAttends(sequence, truth, 352, 77, 320);
}

TEST_F(Think, WhatIsDecodedLosesTheSameChannels) {
  Shape({.layers = 1, .query_heads = 4, .kv_heads = 2, .head_dim = 64});
  client::Sequence sequence = NewSequence("think:ratio=50%,recent_size=64");
  SyntheticSequence truth(shape_, random_.Bits());
  Append(sequence, truth, 200);
  Compress(sequence);
  EXPECT_EQ(CutEntries(Lane(Entries(sequence), 0)), 136u);
  for (int i = 0; i < 150; ++i) Decode(sequence, truth);
  ASSERT_TRUE(sequence.Park().ok());
  // The end of another prompt without queries: its keys lose the same channels as the first one's.
  const auto again = sequence.Compress();
  ASSERT_TRUE(again.ok()) << again.status();
  const v1::DescribeResponse held = Entries(sequence);
  EXPECT_EQ(CutEntries(Lane(held, 0, 1)), 350u - 64);
  ExpectAttends(sequence, truth, 200, 32, 350 - 64);
}

TEST_F(Think, MissingQueriesAreNamed) {
  Shape({.layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 64});
  client::Sequence sequence = NewSequence("think");
  SyntheticSequence truth(shape_, random_.Bits());
  Append(sequence, truth, 200, /*observe=*/false);
  const auto refused = sequence.Compress();
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("Observe"));
  ExpectAttendsToWhatIsLeft(sequence, truth, 1e-4);
}

TEST_F(Think, AfterATokenPolicyAndWithOtherValues) {
  Shape({.layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 64});
  client::Sequence sequence = NewSequence("snapkv:budget=0.5,window=40+think:ratio=0.015625+int8");
  EXPECT_EQ(sequence.policy(), "snapkv:budget=0.5,window=40+think:ratio=0.015625+int8");
  SyntheticSequence truth(shape_, random_.Bits());
  Append(sequence, truth, 200);
  Compress(sequence);
  const v1::DescribeResponse held = Entries(sequence);
  EXPECT_EQ(held.tokens_kept(), 0.5);
  for (const v1::LaneDescription& lane : held.lane()) {
    EXPECT_EQ(lane.entries(), 100u);
    EXPECT_EQ(CutEntries(lane), 68u);
    EXPECT_EQ(lane.segment_run(0).format(), "packed int8");
    EXPECT_EQ(lane.segment_run(0).kept_channels(), 63u);
  }
  ExpectAttendsWithoutOneChannel(sequence, truth, 68, 0.05);  // int8
}

}  // namespace
}  // namespace tessera
