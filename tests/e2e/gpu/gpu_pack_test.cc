// Packed lanes end to end on an emulated GPU: the daemon encodes in its memory, and the worker's
// kernels attend over the result.

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "client/api/worker_access.h"
#include "tests/e2e/gpu/emulated_gpu.h"
#include "tests/e2e/packed_lanes.h"

namespace tessera {
namespace {

// A base class before the workers, so that the GPU outlives them.
struct WithGpu {
  explicit WithGpu(bool by_descriptor) : gpu(by_descriptor) {}
  EmulatedGpu gpu;
};

class PackedLanesOnGpu : protected WithGpu,
                         public PackedLanes,
                         public testing::WithParamInterface<bool> {
 protected:
  PackedLanesOnGpu()
      : WithGpu(GetParam()), PackedLanes(gpu.StartDaemon({"--device=cuda:0"}), &gpu.platform) {}

  // Decodes one token of each sequence in one step. Returns outputs[layer][sequence].
  std::vector<std::vector<Output>> DecodeTogether(std::vector<client::Sequence*> sequences,
                                                  std::vector<SyntheticSequence*> truths) {
    const std::size_t count = sequences.size();
    for (SyntheticSequence* truth : truths) truth->Grow(1);
    std::vector<std::vector<Output>> outputs(shape_.layers);
    auto step = mapped_->BeginStep(sequences);
    EXPECT_TRUE(step.ok()) << step.status();
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      std::vector<std::uint16_t> key, value, query;
      const auto add = [](std::vector<std::uint16_t>& to, const auto& row) {
        to.insert(to.end(), row.begin(), row.end());
      };
      for (SyntheticSequence* truth : truths) {
        add(key, truth->Key(layer, truth->tokens() - 1, 1));
        add(value, truth->Value(layer, truth->tokens() - 1, 1));
        add(query, truth->Query(layer, truth->tokens() - 1));
      }
      Output all = NewOutput(static_cast<std::uint32_t>(count));
      const absl::Status status =
          step->AppendAndAttend(layer, {.key = BytesOf(key),
                                        .value = BytesOf(value),
                                        .query = BytesOf(query),
                                        .output = WritableBytesOf(all.output),
                                        .lse = all.lse});
      EXPECT_TRUE(status.ok()) << status;
      for (std::size_t i = 0; i < count; ++i) {
        Output one = NewOutput();
        std::copy_n(all.output.begin() + i * one.output.size(), one.output.size(),
                    one.output.begin());
        std::copy_n(all.lse.begin() + i * one.lse.size(), one.lse.size(), one.lse.begin());
        outputs[layer].push_back(one);
      }
    }
    const absl::Status status = step->End();
    EXPECT_TRUE(status.ok()) << status;
    return outputs;
  }

  // Signed permutations of channels: rotated rows are exact, so that every implementation writes
  // the same bytes.
  Rotated Permutations(const Packing& packing) {
    Rotated rotated;
    const std::uint32_t channels = packing.channels == 0 ? shape_.head_dim : packing.channels;
    std::vector<std::uint32_t> order(shape_.head_dim);
    std::iota(order.begin(), order.end(), 0u);
    for (std::vector<std::byte>* matrices : {&rotated.key, &rotated.value}) {
      for (std::uint32_t lane = 0; lane < shape_.layers * shape_.kv_heads; ++lane) {
        std::vector<std::uint16_t> matrix(std::size_t{channels} * shape_.head_dim);
        for (std::uint32_t c = 0; c < channels; ++c) {
          std::swap(order[c], order[random_.Between(c, shape_.head_dim - 1)]);
          matrix[std::size_t{c} * shape_.head_dim + order[c]] = random_.OneIn(2) ? 0x3f80 : 0xbf80;
        }
        const std::span<const std::byte> bytes = BytesOf(matrix);
        matrices->insert(matrices->end(), bytes.begin(), bytes.end());
      }
    }
    return rotated;
  }
};

TEST_P(PackedLanesOnGpu, BothTransportsGiveTheSameBits) {
  for (int story = 0; story < 2; ++story) {
    client::Sequence sequence = NewSequence(*mapped_);
    SyntheticSequence truth(shape_, random_.Bits());
    const int parts = static_cast<int>(random_.Between(1, 3));
    for (int part = 0; part < parts; ++part) {
      Append(sequence, truth, random_.Between(1, 80));
      Rotated rotated;
      const Packing packing = RandomPacking(&rotated);
      client::CompressResult response;
      const std::uint64_t before = sequence.tokens();
      ASSERT_TRUE(Compress(sequence, packing, rotated, &response));
      EXPECT_EQ(response.entries_packed + response.entries_left,
                before * shape_.layers * shape_.kv_heads);
    }
    if (random_.OneIn(2)) Append(sequence, truth, random_.Between(1, 40));
    for (int step = 0; step < 3; ++step) {
      const std::vector<Output> by_step = Decode(*mapped_, sequence, truth, std::nullopt);
      for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
        const Output by_rpc =
            ByRpc(*mapped_, sequence, truth, layer, truth.tokens() - 1, std::nullopt);
        ASSERT_TRUE(by_step[layer] == by_rpc) << "layer " << layer << " of " << truth.tokens();
      }
    }
  }
}

// The only difference: kernels that multiply bf16 pairs round queries and weights. Measured:
// 0.0012.
constexpr double kRounding = 0.01;

TEST_P(PackedLanesOnGpu, TheCpuMakesTheSameOfTheSameRows) {
  const auto daemon = DaemonProcess::Start({});
  ASSERT_NE(daemon, nullptr);
  auto cpu = client::Worker::Attach({.address = daemon->address()});
  ASSERT_TRUE(cpu.ok()) << cpu.status();
  const client::Model gpu_model = model_;
  const client::Model cpu_model = *(*cpu)->RegisterModel(shape_.Geometry());
  for (int story = 0; story < 3; ++story) {
    const std::uint64_t seed = random_.Bits();
    const std::uint64_t tokens = random_.Between(1, 120);
    Packing packing = {.kept_channels = shape_.head_dim / 4,
                       .group = 1u << random_.Below(3),
                       .values = static_cast<client::ValueType>(random_.Between(1, 4))};
    Rotated rotated;
    if (random_.OneIn(2)) {
      packing.channels = shape_.head_dim / 2;
      rotated = Permutations(packing);
    }
    std::vector<Output> outputs[2];
    client::CompressResult responses[2];
    for (const bool on_gpu : {false, true}) {
      client::Worker& worker = on_gpu ? *mapped_ : **cpu;
      model_ = on_gpu ? gpu_model : cpu_model;
      client::Sequence sequence = NewSequence(worker);
      SyntheticSequence truth(shape_, seed);
      Append(sequence, truth, tokens);
      ASSERT_TRUE(Compress(sequence, packing, rotated, &responses[on_gpu]));
      outputs[on_gpu] = Decode(worker, sequence, truth, std::nullopt);
    }
    EXPECT_EQ(responses[0].tile_bytes_after, responses[1].tile_bytes_after);
    EXPECT_EQ(responses[0].rotation_bytes, responses[1].rotation_bytes);
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      const auto near = [](const std::vector<float>& a, const std::vector<float>& b) {
        double far = 0;
        for (std::size_t i = 0; i < a.size(); ++i) {
          far = std::max(far, std::fabs(double{a[i]} - b[i]));
        }
        return far;
      };
      EXPECT_LT(near(outputs[0][layer].output, outputs[1][layer].output), kRounding);
      EXPECT_LT(near(outputs[0][layer].lse, outputs[1][layer].lse), kRounding);
    }
  }
}

// A packed prompt, its forks and a dense sequence in one step; then tails that are absorbed after
// packed segments.
TEST_P(PackedLanesOnGpu, PackedAndDenseSequencesDecodeTogether) {
  client::Sequence packed = NewSequence(*mapped_);
  client::Sequence dense = NewSequence(*mapped_);
  SyntheticSequence packed_truth(shape_, random_.Bits());
  SyntheticSequence dense_truth(shape_, random_.Bits());
  Append(packed, packed_truth, random_.Between(33, 80));
  Append(dense, dense_truth, random_.Between(1, 60));
  const Packing packing = {.kept_channels = shape_.head_dim, .summary = Summary::kMean, .block = 8};
  ASSERT_TRUE(Compress(packed, packing, RandomRotations(packing)));
  auto fork = packed.Fork();
  ASSERT_TRUE(fork.ok()) << fork.status();
  SyntheticSequence fork_truth = packed_truth.Fork(random_.Bits());
  const std::uint64_t keep = random_.Between(1, fork_truth.tokens());
  ASSERT_TRUE(fork->Truncate(keep).ok());
  fork_truth.Truncate(keep);
  Append(*fork, fork_truth, random_.Between(1, 40));
  ASSERT_TRUE(
      Compress(*fork, packing, RandomRotations(packing)));  // adds a second strategy to its lanes
  for (int token = 0; token < 40; ++token) {
    const auto outputs =
        DecodeTogether({&packed, &dense, &*fork}, {&packed_truth, &dense_truth, &fork_truth});
    if (token % 13 != 0) continue;
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      const SyntheticSequence* const truths[] = {&packed_truth, &dense_truth, &fork_truth};
      for (std::size_t i = 0; i < 3; ++i) {
        ASSERT_LT(truths[i]->Error(layer, truths[i]->tokens() - 1, outputs[layer][i].output), 0.05)
            << "sequence " << i << " of " << truths[i]->tokens() << " tokens";
      }
    }
  }
}

TEST_P(PackedLanesOnGpu, AValueThatDoesNotFitIsNamedAndNothingChanges) {
  client::Sequence sequence = NewSequence(*mapped_);
  SyntheticSequence truth(shape_, random_.Bits());
  truth.Grow(70);
  const auto value = truth.ValuesOfAllLayers(0, 70);
  auto key = truth.KeysOfAllLayers(0, 70);
  key[43 * shape_.kv_row() + 5] = 0x4789;  // 70144, in layer 0, token 43, head 0
  ASSERT_TRUE(sequence.Append({.key = BytesOf(key), .value = BytesOf(value), .tokens = 70}).ok());
  const auto compressed = sequence.Compress(
      {.kept_channels = 16, .values = client::ValueType::kFp16}, client::RotationTensors{});
  ASSERT_TRUE(absl::IsInvalidArgument(compressed.status())) << compressed.status();
  EXPECT_THAT(compressed.status().ToString(),
              testing::HasSubstr(
                  "layer 0, kv head 0: K or V of token 43 is not finite when stored as fp16"));
  const auto described = client::DescribeMessage(sequence, client::Detail::kLanes);
  ASSERT_TRUE(described.ok()) << described.status();
  EXPECT_EQ(described->lane(0).segment_run(0).format(), "dense bf16");
  // Fits in bf16.
  ASSERT_TRUE(Compress(sequence, {.kept_channels = 16}, {}));
}

// The staging arena is also in GPU memory: rotations are copied there and read back for checks.
TEST_P(PackedLanesOnGpu, LargeRotationsTravelThroughTheStagingArena) {
  const auto small = gpu.StartDaemon({"--device=cuda:0", "--max-message-bytes=64KiB"});
  ASSERT_NE(small, nullptr);
  shape_ = {.layers = 1, .query_heads = 2, .kv_heads = 2, .head_dim = 128};
  auto worker = client::AttachWith({.address = small->address()}, {.gpus = gpus_});
  ASSERT_TRUE(worker.ok()) << worker.status();
  model_ = *(*worker)->RegisterModel(shape_.Geometry());
  client::Sequence sequence = NewSequence(**worker);
  SyntheticSequence truth(shape_, random_.Bits());
  Append(sequence, truth, 40);
  const Packing packing = {.kept_channels = 128};
  ASSERT_TRUE(Compress(sequence, packing, RandomRotations(packing)));
  const std::vector<Output> outputs = Decode(**worker, sequence, truth, std::nullopt);
  EXPECT_LT(truth.Error(0, 40, outputs[0].output), 0.05);
}

INSTANTIATE_TEST_SUITE_P(Sharing, PackedLanesOnGpu, testing::Bool(), [](const auto& param) {
  return std::string(param.param ? "ByDescriptor" : "ByIpc");
});

}  // namespace
}  // namespace tessera
