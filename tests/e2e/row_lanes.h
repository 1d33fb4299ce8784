// Fixture that reads rows back, and compares attention over them with the daemon's own.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>
#include <vector>

#include "tests/e2e/tokens/token_lanes.h"

namespace tessera {

using client::ElementType;
using client::LaneRows;
using client::RowRange;
using client::SequenceRows;

class RowLanes : public Tokens {
 protected:
  using Tokens::Tokens;

  SequenceRows Read(client::Sequence& sequence, const RowRange& range) {
    const auto rows = sequence.Read(range);
    EXPECT_TRUE(rows.ok()) << rows.status();
    return rows.value_or(SequenceRows());
  }
  static std::vector<float> Floats(std::span<const std::byte> bytes) {
    std::vector<float> floats(bytes.size() / sizeof(float));
    std::memcpy(floats.data(), bytes.data(), bytes.size());
    return floats;
  }
  // Attention of one query row over the rows of a lane, in double precision.
  std::vector<double> ByDefinition(const LaneRows& lane, std::span<const std::uint16_t> query) {
    const std::uint32_t dim = shape_.head_dim;
    const std::vector<float> keys = Floats(lane.key);
    const std::vector<float> values = Floats(lane.value);
    std::vector<double> logits;
    for (std::size_t i = 0; i < lane.positions.size(); ++i) {
      double dot = 0;
      for (std::uint32_t d = 0; d < dim; ++d) {
        dot += double{keys[i * dim + d]} * kernels::Bf16ToFloat(query[d]);
      }
      const double weight = lane.weights.empty() ? 1 : lane.weights[i];
      logits.push_back(dot / std::sqrt(dim) + std::log(weight));
    }
    const double most = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    std::vector<double> output(dim);
    for (std::size_t i = 0; i < logits.size(); ++i) {
      const double share = std::exp(logits[i] - most);
      sum += share;
      for (std::uint32_t d = 0; d < dim; ++d) output[d] += share * values[i * dim + d];
    }
    for (double& element : output) element /= sum;
    return output;
  }
  std::vector<float> Attend(client::Sequence& sequence, std::span<const std::uint16_t> query,
                            std::uint32_t layer) {
    std::vector<float> output(shape_.query_row());
    const client::AttendQuery asked[] = {
        {.sequence = &sequence, .query = std::as_bytes(query), .output = WritableBytesOf(output)}};
    const absl::Status status =
        mapped_->AttendRpc(layer, asked, {.selection = client::SelectionRule{.rate = 1}});
    EXPECT_TRUE(status.ok()) << status;
    return output;
  }
  // The largest difference of attention over the rows that are read from the daemon's own, as a
  // share of the largest element of its output.
  double Difference(client::Sequence& sequence, const SyntheticSequence& truth) {
    double worst = 0;
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      const SequenceRows rows = Read(sequence, {.layer = layer, .type = ElementType::kFp32});
      EXPECT_EQ(rows.lanes.size(), shape_.kv_heads);
      for (int i = 0; i < 3 && !HasFailure(); ++i) {
        const auto query = truth.Query(layer, random_.Below(truth.tokens()));
        const std::vector<float> output = Attend(sequence, query, layer);
        double peak = 0;
        for (const float element : output) peak = std::max<double>(peak, std::abs(element));
        for (std::uint32_t head = 0; head < shape_.query_heads; ++head) {
          const std::size_t at = std::size_t{head} * shape_.head_dim;
          const auto exact = ByDefinition(rows.lanes[head / shape_.group()],
                                          std::span(query).subspan(at, shape_.head_dim));
          for (std::uint32_t d = 0; d < shape_.head_dim; ++d) {
            worst = std::max(worst, std::abs(output[at + d] - exact[d]) / peak);
          }
        }
      }
    }
    return worst;
  }
  // Positions and weights are those that Describe reports, and the tail's.
  void ExpectDescribed(client::Sequence& sequence) {
    const v1::DescribeResponse held = Entries(sequence);
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      for (const LaneRows& lane : Read(sequence, {.layer = layer}).lanes) {
        const v1::LaneDescription& described = Lane(held, layer, lane.kv_head);
        Positions positions(described.position().begin(), described.position().end());
        for (std::uint64_t i = 0; i < described.tail_entries(); ++i) {
          positions.push_back(described.tokens() + i);
        }
        EXPECT_EQ(lane.lane_entries, positions.size());
        ASSERT_EQ(lane.positions, positions);
        std::vector<float> weights(described.weight().begin(), described.weight().end());
        if (!weights.empty()) weights.resize(positions.size(), 1);
        ASSERT_EQ(lane.weights, weights);
      }
    }
  }
};

}  // namespace tessera
