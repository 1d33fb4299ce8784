// Fixture with a daemon and one worker per transport, and helpers for tests of token policies.
#pragma once

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "client/api/worker_access.h"
#include "tests/e2e/packed_lanes.h"

namespace tessera {

using testing::ElementsAreArray;
using testing::HasSubstr;
using Positions = std::vector<std::uint64_t>;

// Packs rows without dropping a channel: they differ only by rounding.
inline const std::string kAllChannels =
    "+bf16+mosaickv:sinks=0,recent=0,keep=1,group=1,loss_k=1,loss_v=1,select=0,min_segment=32";

// All of [0, tokens) except these.
inline Positions AllExcept(std::uint64_t tokens, const Positions& gone) {
  Positions left;
  for (std::uint64_t i = 0; i < tokens; ++i) {
    if (std::find(gone.begin(), gone.end(), i) == gone.end()) left.push_back(i);
  }
  return left;
}
inline Positions Range(std::uint64_t first, std::uint64_t last) {  // inclusive
  Positions range(last - first + 1);
  std::iota(range.begin(), range.end(), first);
  return range;
}

// The first entries of each lane whose keys lack a channel.
struct MissingChannel {
  int entries = 0;
  std::uint32_t channel = 0;
};

class Tokens : public testing::Test {
 protected:
  Tokens() : Tokens(DaemonProcess::Start({}), nullptr) {}
  // `gpus` are those of this process; null: the machine's.
  Tokens(std::unique_ptr<DaemonProcess> daemon, const client::GpuPlatform* gpus)
      : daemon_(std::move(daemon)), gpus_(gpus) {}

  void SetUp() override {
    ASSERT_NE(daemon_, nullptr);
    for (bool map : {true, false}) {
      auto worker =
          client::AttachWith({.address = daemon_->address(), .map_memory = map}, {.gpus = gpus_});
      ASSERT_TRUE(worker.ok()) << worker.status();
      (map ? mapped_ : remote_) = *std::move(worker);
    }
  }

  void Shape(const SyntheticShape& shape) {
    shape_ = shape;
    const auto model = mapped_->RegisterModel(shape.Geometry());
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *model;
  }
  client::Sequence NewSequence(const std::string& policy) {
    auto sequence = mapped_->CreateSequence(model_, policy);
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    return *std::move(sequence);
  }
  // Appends tokens and lets the sequence observe their queries.
  void Append(client::Sequence& sequence, SyntheticSequence& truth, std::uint64_t count,
              bool observe = true) {
    const std::uint64_t first = truth.tokens();
    truth.Grow(count);
    const auto key = truth.KeysOfAllLayers(first, count);
    const auto value = truth.ValuesOfAllLayers(first, count);
    const auto held =
        sequence.Append({.key = BytesOf(key), .value = BytesOf(value), .tokens = count});
    ASSERT_TRUE(held.ok()) << held.status();
    if (observe) Observe(sequence, truth, first, count);
  }
  // Uploads the observations of a worker that computes attention itself.
  void Observe(client::Sequence& sequence, const SyntheticSequence& truth, std::uint64_t first,
               std::uint64_t count) {
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      std::vector<std::uint16_t> queries;
      for (std::uint64_t t = first; t < first + count; ++t) {
        const auto row = truth.Query(layer, t);
        queries.insert(queries.end(), row.begin(), row.end());
      }
      const auto keys = truth.Key(layer, first, count);
      const absl::Status seen = sequence.Observe({.layer = layer,
                                                  .first_token = first,
                                                  .query = BytesOf(queries),
                                                  .key = std::as_bytes(keys)});
      ASSERT_TRUE(seen.ok()) << seen;
    }
  }
  // Decodes one token through the mapping, or in the sequence's own worker.
  void Decode(client::Sequence& sequence, SyntheticSequence& truth,
              client::Worker* worker = nullptr) {
    const std::uint64_t at = truth.tokens();
    truth.Grow(1);
    client::Sequence* const batch[] = {&sequence};
    for (;;) {
      auto step = (worker != nullptr ? *worker : *mapped_).BeginStep(batch);
      ASSERT_TRUE(step.ok()) << step.status();
      for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
        (void)step->Append(layer, std::as_bytes(truth.Key(layer, at, 1)),
                           std::as_bytes(truth.Value(layer, at, 1)));
      }
      const absl::Status status = step->End();
      if (absl::IsAborted(status)) continue;
      ASSERT_TRUE(status.ok()) << status;
      return;
    }
  }
  // The same, and attends, so that the queries are observed.
  void DecodeAndAttend(client::Sequence& sequence, SyntheticSequence& truth) {
    const std::uint64_t at = truth.tokens();
    truth.Grow(1);
    client::Sequence* const batch[] = {&sequence};
    std::vector<float> output(shape_.query_row());
    for (;;) {
      auto step = mapped_->BeginStep(batch);
      ASSERT_TRUE(step.ok()) << step.status();
      for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
        const auto query = truth.Query(layer, at);
        (void)step->AppendAndAttend(layer, {.key = std::as_bytes(truth.Key(layer, at, 1)),
                                            .value = std::as_bytes(truth.Value(layer, at, 1)),
                                            .query = BytesOf(query),
                                            .output = WritableBytesOf(output)});
      }
      const absl::Status status = step->End();
      if (absl::IsAborted(status)) continue;
      ASSERT_TRUE(status.ok()) << status;
      return;
    }
  }
  client::CompressResult Compress(client::Sequence& sequence) {
    const auto compressed = sequence.Compress();
    EXPECT_TRUE(compressed.ok()) << compressed.status();
    return compressed.value_or(client::CompressResult());
  }
  v1::DescribeResponse Entries(const client::Sequence& sequence) {
    const auto described = client::DescribeMessage(sequence, client::Detail::kEntries);
    EXPECT_TRUE(described.ok()) << described.status();
    return described.value_or(v1::DescribeResponse());
  }
  const v1::LaneDescription& Lane(const v1::DescribeResponse& from, std::uint32_t layer,
                                  std::uint32_t head = 0) {
    return from.lane(static_cast<int>(layer * shape_.kv_heads + head));
  }

  // Compares both transports with attention in double precision over the entries that the lanes
  // report.
  void ExpectAttendsToWhatIsLeft(client::Sequence& sequence, const SyntheticSequence& truth,
                                 double tolerance) {
    const v1::DescribeResponse held = Entries(sequence);
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      const std::vector<double> exact = ByDefinition(held, truth, layer);
      for (client::Worker* worker : {mapped_.get(), remote_.get()}) {
        std::vector<float> output(shape_.query_row());
        const auto query = truth.Query(layer, truth.tokens() - 1);
        const client::AttendQuery asked[] = {
            {.sequence = &sequence, .query = BytesOf(query), .output = WritableBytesOf(output)}};
        const absl::Status status = worker->AttendRpc(layer, asked, {});
        ASSERT_TRUE(status.ok()) << status;
        for (std::size_t i = 0; i < output.size(); ++i) {
          ASSERT_NEAR(output[i], exact[i], tolerance) << "layer " << layer << " element " << i;
        }
      }
    }
  }
  // Attention over entries of weight 1.
  std::vector<double> ByDefinition(const v1::DescribeResponse& held, const SyntheticSequence& truth,
                                   std::uint32_t layer, const MissingChannel& missing = {}) {
    const auto query = truth.Query(layer, truth.tokens() - 1);
    const std::uint32_t dim = shape_.head_dim;
    std::vector<double> output(shape_.query_row());
    for (std::uint32_t head = 0; head < shape_.query_heads; ++head) {
      const std::uint32_t kv_head = head / shape_.group();
      const v1::LaneDescription& lane = Lane(held, layer, kv_head);
      const auto row = [&](std::span<const std::uint16_t> rows) {
        return rows.subspan(std::size_t{kv_head} * dim, dim);
      };
      std::vector<double> logits;
      for (int i = 0; i < lane.position_size(); ++i) {
        double dot = 0;
        const auto key = row(truth.Key(layer, lane.position(i), 1));
        for (std::uint32_t d = 0; d < dim; ++d) {
          if (i < missing.entries && d == missing.channel) continue;
          dot += static_cast<double>(kernels::Bf16ToFloat(key[d])) *
                 kernels::Bf16ToFloat(query[std::size_t{head} * dim + d]);
        }
        logits.push_back(dot / std::sqrt(dim));
      }
      const double most = *std::max_element(logits.begin(), logits.end());
      double sum = 0;
      for (int i = 0; i < lane.position_size(); ++i) {
        const double share = std::exp(logits[static_cast<std::size_t>(i)] - most);
        sum += share;
        const auto value = row(truth.Value(layer, lane.position(i), 1));
        for (std::uint32_t d = 0; d < dim; ++d) {
          output[std::size_t{head} * dim + d] += share * kernels::Bf16ToFloat(value[d]);
        }
      }
      for (std::uint32_t d = 0; d < dim; ++d) output[std::size_t{head} * dim + d] /= sum;
    }
    return output;
  }

  TestRandom random_;
  std::unique_ptr<DaemonProcess> daemon_;
  const client::GpuPlatform* gpus_;
  std::unique_ptr<client::Worker> mapped_;
  std::unique_ptr<client::Worker> remote_;
  SyntheticShape shape_;
  client::Model model_;
};

}  // namespace tessera
