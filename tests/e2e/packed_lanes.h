// Fixture with a daemon and one worker per transport, and helpers for tests of packed lanes.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "client/api/worker_access.h"
#include "client/bench/workload/synthetic.h"
#include "client/session/kernel_types.h"
#include "tessera/worker.h"
#include "tests/fakes/daemon/daemon_process.h"
#include "tests/fakes/rotations.h"
#include "tests/fakes/seed.h"

namespace tessera {

using cli::BytesOf;
using cli::SyntheticSequence;
using cli::SyntheticShape;
using cli::WritableBytesOf;
using client::Packing;
using client::SelectionRule;
using client::Summary;
using fakes::DaemonProcess;

struct Rotated {
  std::vector<std::byte> key;
  std::vector<std::byte> value;
  kernels::ElementType type = kernels::ElementType::kBf16;
  client::RotationTensors tensors() const {
    return {.key = key, .value = value, .type = client::FromKernels(type)};
  }
};

class PackedLanes : public testing::Test {
 protected:
  PackedLanes() : PackedLanes(DaemonProcess::Start({}), nullptr) {}
  // `gpus` are those of this process; null: the machine's.
  PackedLanes(std::unique_ptr<DaemonProcess> daemon, const client::GpuPlatform* gpus)
      : daemon_(std::move(daemon)), gpus_(gpus) {}

  void SetUp() override {
    ASSERT_NE(daemon_, nullptr);
    Attach(mapped_, true);
    Attach(remote_, false);
    ASSERT_TRUE(mapped_->mapped());
    ASSERT_FALSE(remote_->mapped());
    shape_.layers = static_cast<std::uint32_t>(random_.Between(1, 2));
    shape_.kv_heads = static_cast<std::uint32_t>(random_.Between(1, 2));
    shape_.query_heads = shape_.kv_heads * static_cast<std::uint32_t>(random_.Between(1, 4));
    shape_.head_dim = 64u << random_.Below(3);
    model_ = *mapped_->RegisterModel(shape_.Geometry());
  }
  void Attach(std::unique_ptr<client::Worker>& worker, bool map_memory) {
    auto attached = client::AttachWith({.address = daemon_->address(), .map_memory = map_memory},
                                       {.gpus = gpus_});
    ASSERT_TRUE(attached.ok()) << attached.status();
    worker = *std::move(attached);
  }

  client::Sequence NewSequence(client::Worker& worker) {
    auto sequence = worker.CreateSequence(model_);
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    return *std::move(sequence);
  }
  void Append(client::Sequence& sequence, SyntheticSequence& truth, std::uint64_t count) {
    const std::uint64_t first = truth.tokens();
    truth.Grow(count);
    const auto key = truth.KeysOfAllLayers(first, count);
    const auto value = truth.ValuesOfAllLayers(first, count);
    const auto held =
        sequence.Append({.key = BytesOf(key), .value = BytesOf(value), .tokens = count});
    ASSERT_TRUE(held.ok()) << held.status();
  }

  Rotated RandomRotations(const Packing& packing) {
    Rotated rotated;
    if (random_.OneIn(2)) rotated.type = kernels::ElementType::kFp32;
    const std::size_t lanes = std::size_t{shape_.layers} * shape_.kv_heads;
    const std::uint32_t channels = packing.channels == 0 ? shape_.head_dim : packing.channels;
    rotated.key = fakes::RandomRotations(random_, lanes, channels, shape_.head_dim, rotated.type);
    rotated.value = fakes::RandomRotations(random_, lanes, channels, shape_.head_dim, rotated.type);
    return rotated;
  }
  // A random packing. Rotated if `rotated` is non-null.
  Packing RandomPacking(Rotated* rotated) {
    Packing packing;
    packing.summary = static_cast<Summary>(random_.Below(3));
    if (packing.summary != Summary::kNone) packing.block = 4u << random_.Below(3);
    if (packing.summary != Summary::kNone && random_.OneIn(4)) {
      packing.dense = true;
      return packing;
    }
    packing.group = 1u << random_.Below(3);
    packing.values = static_cast<client::ValueType>(random_.Between(1, 4));
    const bool turned = random_.OneIn(2);
    if (turned && random_.OneIn(2)) {
      packing.channels = packing.group * static_cast<std::uint32_t>(
                                             random_.Between(4, shape_.head_dim / packing.group));
    }
    const std::uint32_t channels = packing.channels == 0 ? shape_.head_dim : packing.channels;
    packing.kept_channels =
        packing.group * static_cast<std::uint32_t>(random_.Between(1, channels / packing.group));
    if (turned) *rotated = RandomRotations(packing);
    return packing;
  }
  bool Compress(client::Sequence& sequence, const Packing& packing, const Rotated& rotated,
                client::CompressResult* response = nullptr) {
    const auto compressed = sequence.Compress(packing, rotated.tensors());
    EXPECT_TRUE(compressed.ok()) << compressed.status();
    if (compressed.ok() && response != nullptr) *response = *compressed;
    return compressed.ok();
  }

  struct Output {
    std::vector<float> output;
    std::vector<float> lse;
    bool operator==(const Output& other) const {
      return std::memcmp(output.data(), other.output.data(), output.size() * 4) == 0 &&
             std::memcmp(lse.data(), other.lse.data(), lse.size() * 4) == 0;
    }
  };
  Output NewOutput(std::uint32_t queries = 1) const {
    return {std::vector<float>(queries * shape_.query_row()),
            std::vector<float>(std::size_t{queries} * shape_.query_heads)};
  }

  // Attends by RPC with the query of the token at `position`.
  Output ByRpc(client::Worker& worker, const client::Sequence& sequence,
               const SyntheticSequence& truth, std::uint32_t layer, std::uint64_t position,
               const std::optional<SelectionRule>& rule) {
    Output out = NewOutput();
    const auto query = truth.Query(layer, position);
    const client::AttendQuery queries[] = {{.sequence = &sequence,
                                            .query = BytesOf(query),
                                            .output = WritableBytesOf(out.output),
                                            .lse = out.lse,
                                            .first_query_position = position}};
    const absl::Status status = worker.AttendRpc(layer, queries, {.selection = rule});
    EXPECT_TRUE(status.ok()) << status;
    return out;
  }
  // Decodes one token in a step. Returns one output per layer.
  std::vector<Output> Decode(client::Worker& worker, client::Sequence& sequence,
                             SyntheticSequence& truth, const std::optional<SelectionRule>& rule) {
    truth.Grow(1);
    const std::uint64_t token = truth.tokens() - 1;
    client::Sequence* const batch[] = {&sequence};
    std::vector<Output> outputs;
    absl::Status status;
    do {
      outputs.assign(shape_.layers, NewOutput());
      auto step = worker.BeginStep(batch);
      EXPECT_TRUE(step.ok()) << step.status();
      for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
        const auto query = truth.Query(layer, token);
        status = step->AppendAndAttend(layer, {.key = BytesOf(truth.Key(layer, token, 1)),
                                               .value = BytesOf(truth.Value(layer, token, 1)),
                                               .query = BytesOf(query),
                                               .output = WritableBytesOf(outputs[layer].output),
                                               .lse = outputs[layer].lse,
                                               .selection = rule});
        EXPECT_TRUE(status.ok() || absl::IsAborted(status)) << status;
      }
      status = step->End();
    } while (absl::IsAborted(status));
    EXPECT_TRUE(status.ok()) << status;
    return outputs;
  }
  SelectionRule RandomRule() {
    SelectionRule rule = {.rate = static_cast<double>(random_.Between(1, 100)) / 100,
                          .first_block = random_.OneIn(2)};
    if (random_.OneIn(2)) {
      rule.entries = random_.Between(1, 200);
    } else if (random_.OneIn(3)) {
      rule.floor = random_.Between(1, 200);
    }
    if (random_.OneIn(2)) rule.judge = SelectionRule::Judge::kLogit;
    rule.each_head = random_.OneIn(3);
    return rule;
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
