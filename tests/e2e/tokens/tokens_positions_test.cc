// Policies that move positions (`pos=slot`) end to end: keys are at the positions that the worker
// was told, and it learns of moves by other workers.

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "tessera/v1/tessera.grpc.pb.h"
#include "tests/e2e/tokens/token_lanes.h"
#include "tests/fakes/raw_worker.h"

namespace tessera {
namespace {

// The worker writes keys at the position that it is told, and they are re-rotated when others are
// evicted: each remaining key is rotated for its place in the lane.
class ByPlace : public Tokens, public testing::WithParamInterface<const char*> {
 protected:
  static constexpr double kTheta = 10000;

  // Odd layers have a RoPE of their own, as in models whose local and global layers differ.
  static double ThetaOf(std::uint32_t layer) { return layer % 2 == 0 ? kTheta : 100 * kTheta; }
  client::ModelGeometry TwoBases() const {
    client::ModelGeometry geometry = shape_.Geometry();
    geometry.rope.theta = kTheta;
    for (std::uint32_t layer = 1; layer < shape_.layers; layer += 2) {
      geometry.layers[layer].rope = client::Rope{.theta = ThetaOf(layer)};
    }
    return geometry;
  }

  static std::vector<std::uint16_t> Turned(std::span<const std::uint16_t> row, double position,
                                           double theta) {
    const std::size_t half = row.size() / 2;
    std::vector<std::uint16_t> turned(row.size());
    for (std::size_t i = 0; i < half; ++i) {
      const double angle = position * std::pow(theta, -static_cast<double>(i) / half);
      const double x = kernels::Bf16ToFloat(row[i]);
      const double y = kernels::Bf16ToFloat(row[i + half]);
      turned[i] =
          kernels::FloatToBf16(static_cast<float>(x * std::cos(angle) - y * std::sin(angle)));
      turned[i + half] =
          kernels::FloatToBf16(static_cast<float>(x * std::sin(angle) + y * std::cos(angle)));
    }
    return turned;
  }

  void Step(client::Sequence& sequence, SyntheticSequence& truth) {
    const std::uint64_t at = truth.tokens();
    truth.Grow(1);
    client::Sequence* const batch[] = {&sequence};
    for (;;) {
      auto step = mapped_->BeginStep(batch);
      ASSERT_TRUE(step.ok()) << step.status();
      for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
        const auto key = Turned(truth.Key(layer, at, 1),
                                static_cast<double>(sequence.next_position()), ThetaOf(layer));
        (void)step->Append(layer, BytesOf(key), std::as_bytes(truth.Value(layer, at, 1)));
      }
      const absl::Status status = step->End();
      if (absl::IsAborted(status)) continue;
      ASSERT_TRUE(status.ok()) << status;
      return;
    }
  }

  // Attention with a query at the next position over keys at positions 0, 1, 2, ...
  void ExpectStandsInPlace(client::Sequence& sequence, const SyntheticSequence& truth) {
    const v1::DescribeResponse held = Entries(sequence);
    const std::uint32_t dim = shape_.head_dim;
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      const v1::LaneDescription& lane = Lane(held, layer);
      ASSERT_EQ(sequence.next_position(), static_cast<std::uint64_t>(lane.position_size()));
      const auto query = Turned(truth.Query(layer, 0),
                                static_cast<double>(sequence.next_position()), ThetaOf(layer));
      std::vector<double> logits;
      for (int i = 0; i < lane.position_size(); ++i) {
        const auto key = Turned(truth.Key(layer, lane.position(i), 1), i, ThetaOf(layer));
        double dot = 0;
        for (std::uint32_t d = 0; d < dim; ++d) {
          dot += static_cast<double>(kernels::Bf16ToFloat(key[d])) * kernels::Bf16ToFloat(query[d]);
        }
        logits.push_back(dot / std::sqrt(dim));
      }
      const double most = *std::max_element(logits.begin(), logits.end());
      std::vector<double> exact(dim);
      double sum = 0;
      for (int i = 0; i < lane.position_size(); ++i) {
        const double share = std::exp(logits[static_cast<std::size_t>(i)] - most);
        sum += share;
        const auto value = truth.Value(layer, lane.position(i), 1);
        for (std::uint32_t d = 0; d < dim; ++d) exact[d] += share * kernels::Bf16ToFloat(value[d]);
      }
      std::vector<float> output(dim);
      const client::AttendQuery asked[] = {
          {.sequence = &sequence, .query = BytesOf(query), .output = WritableBytesOf(output)}};
      ASSERT_TRUE(mapped_->AttendRpc(layer, asked, {}).ok());
      for (std::uint32_t d = 0; d < dim; ++d) ASSERT_NEAR(output[d], exact[d] / sum, 0.03) << d;
    }
  }
};

TEST_P(ByPlace, KeysAreTurnedToWhereTheyAre) {
  shape_ = {.layers = 4, .query_heads = 1, .kv_heads = 1, .head_dim = 64};
  const client::ModelGeometry geometry = TwoBases();
  model_ = *mapped_->RegisterModel(geometry);
  client::Sequence sequence = NewSequence(GetParam());
  SyntheticSequence truth(shape_, random_.Bits());
  for (int i = 0; i < 300; ++i) ASSERT_NO_FATAL_FAILURE(Step(sequence, truth));
  EXPECT_LT(sequence.next_position(), 120u);
  Compress(sequence);
  ExpectStandsInPlace(sequence, truth);
  // A fork continues from there. A cut among moved tokens is refused.
  auto fork = sequence.Fork();
  ASSERT_TRUE(fork.ok()) << fork.status();
  EXPECT_EQ(fork->next_position(), sequence.next_position());
  EXPECT_EQ(sequence.Truncate(100).code(), absl::StatusCode::kFailedPrecondition);
  for (int i = 0; i < 100; ++i) ASSERT_NO_FATAL_FAILURE(Step(sequence, truth));
  Compress(sequence);
  ExpectStandsInPlace(sequence, truth);
}

// A worker's rows are valid for the positions at the time its tail was opened; otherwise they are
// refused.
TEST_P(ByPlace, WhatAnotherSessionHasMovedIsNoticed) {
  shape_ = {.layers = 4, .query_heads = 1, .kv_heads = 1, .head_dim = 64};
  const client::ModelGeometry geometry = TwoBases();
  model_ = *mapped_->RegisterModel(geometry);
  client::Sequence sequence = NewSequence(GetParam());
  SyntheticSequence truth(shape_, random_.Bits());
  for (int i = 0; i < 90; ++i) ASSERT_NO_FATAL_FAILURE(Step(sequence, truth));
  const std::uint64_t before = sequence.next_position();
  client::Sequence* const batch[] = {&sequence};
  auto step = mapped_->BeginStep(batch);
  ASSERT_TRUE(step.ok()) << step.status();
  for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
    const auto row = std::as_bytes(truth.Key(layer, 0, 1));
    ASSERT_TRUE(step->Append(layer, row, row).ok());
  }
  fakes::RawWorker other(daemon_->Connect());
  ASSERT_TRUE(other.Attach().ok());
  grpc::ClientContext context;
  v1::CompressRequest request;
  v1::CompressResponse response;
  *request.mutable_session() = other.key();
  request.set_sequence_id(sequence.id().value());
  const grpc::Status compressed = other.stub().Compress(&context, request, &response);
  ASSERT_TRUE(compressed.ok()) << compressed.error_message();
  EXPECT_TRUE(absl::IsAborted(step->End()));
  const absl::Status noticed = mapped_->BeginStep(batch).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(noticed)) << noticed;
  EXPECT_THAT(std::string(noticed.message()), HasSubstr("another caller has compressed"));
  EXPECT_EQ(sequence.tokens(), 90u);
  EXPECT_EQ(sequence.next_position(), 90 - response.position_shift());
  EXPECT_LT(sequence.next_position(), before);
  for (int i = 0; i < 40; ++i) ASSERT_NO_FATAL_FAILURE(Step(sequence, truth));
  Compress(sequence);
  ExpectStandsInPlace(sequence, truth);
}

// The same for rows that it computes for calls.
TEST_P(ByPlace, WhatAnotherSessionHasMovedIsNoticedByCalls) {
  shape_ = {.layers = 4, .query_heads = 1, .kv_heads = 1, .head_dim = 64};
  const client::ModelGeometry geometry = TwoBases();
  fakes::RawWorker other(daemon_->Connect());
  ASSERT_TRUE(other.Attach().ok());
  for (client::Worker* worker : {mapped_.get(), remote_.get()}) {
    SCOPED_TRACE(worker == mapped_.get() ? "in bulk" : "a step");
    auto sequence = worker->CreateSequence(*worker->RegisterModel(geometry), GetParam());
    ASSERT_TRUE(sequence.ok()) << sequence.status();
    SyntheticSequence truth(shape_, random_.Bits());
    Append(*sequence, truth, 100, /*observe=*/false);
    std::uint64_t shift = 0;
    const auto compress = [&] {
      grpc::ClientContext context;
      v1::CompressRequest request;
      v1::CompressResponse response;
      *request.mutable_session() = other.key();
      request.set_sequence_id(sequence->id().value());
      EXPECT_TRUE(other.stub().Compress(&context, request, &response).ok());
      shift = response.position_shift();
    };
    truth.Grow(1);
    const auto key = truth.KeysOfAllLayers(100, 1);
    const auto more = [&](bool meanwhile) -> absl::Status {
      if (worker == mapped_.get()) {
        if (meanwhile) compress();
        return sequence->Append({.key = BytesOf(key), .value = BytesOf(key), .tokens = 1}).status();
      }
      client::Sequence* const batch[] = {&*sequence};
      auto step = worker->BeginStep(batch);
      if (!step.ok()) return step.status();
      if (meanwhile) compress();
      absl::Status status;
      for (std::uint32_t layer = 0; layer < shape_.layers && status.ok(); ++layer) {
        const auto row = std::as_bytes(truth.Key(layer, 100, 1));
        status = step->Append(layer, row, row);
      }
      return status.ok() ? step->End() : status;
    };
    if (worker == remote_.get()) {  // compresses it before its first step
      ASSERT_TRUE(more(false).ok());
      ASSERT_TRUE(more(false).ok());
    }
    const std::uint64_t tokens = sequence->tokens();
    const absl::Status noticed = more(/*meanwhile=*/true);
    EXPECT_TRUE(absl::IsFailedPrecondition(noticed)) << noticed;
    EXPECT_THAT(std::string(noticed.message()), HasSubstr("another caller has compressed"));
    EXPECT_GT(shift, 0u);
    EXPECT_EQ(sequence->next_position(), tokens - shift);
    EXPECT_TRUE(more(false).ok());
    EXPECT_EQ(sequence->tokens(), tokens + 1);
  }
}

INSTANTIATE_TEST_SUITE_P(Systems, ByPlace,
                         testing::Values("lacache:budget=64,span=2,overlap=1,sink=4,pos=slot",
                                         "streaming:sink=4,recent=60,pos=slot"));

}  // namespace
}  // namespace tessera
