// Token policies end to end on an emulated GPU: keys are scored, merged and gathered in memory that
// the daemon cannot read directly.

#include <gmock/gmock.h>

#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tests/e2e/gpu/emulated_gpu.h"
#include "tests/e2e/row_lanes.h"

namespace tessera {
namespace {

class TokensOnGpu : protected WithEmulatedGpu, public Tokens {
 protected:
  TokensOnGpu() : Tokens(gpu.StartDaemon({"--device=cuda:0"}), &gpu.platform) {}
};

TEST_F(TokensOnGpu, WhatIsLeftIsAttendedTo) {
  Shape({.layers = 1, .query_heads = 2, .kv_heads = 1, .head_dim = 64});
  for (const std::string& policy :
       {std::string("snapkv:budget=0.3,window=16"), "snapkv:budget=0.3,window=16" + kAllChannels,
        std::string("streaming:sink=4,recent=60"), "streaming:sink=4,recent=60" + kAllChannels}) {
    SCOPED_TRACE(policy);
    client::Sequence sequence = NewSequence(policy);
    SyntheticSequence truth(shape_, random_.Bits());
    Append(sequence, truth, 150);
    Compress(sequence);
    EXPECT_LT(Entries(sequence).tokens_kept(), 0.5);
    ExpectAttendsToWhatIsLeft(sequence, truth, 0.03);
    for (int i = 0; i < 70; ++i) Decode(sequence, truth);
    ASSERT_TRUE(sequence.Park().ok());
    ExpectAttendsToWhatIsLeft(sequence, truth, 0.03);
  }
}

TEST_F(TokensOnGpu, MergedEntriesCarryTheirWeights) {
  Shape({.layers = 1, .query_heads = 2, .kv_heads = 1, .head_dim = 64});
  client::Sequence sequence = NewSequence("semanticache:tau=0,sink=0,recent=0");
  SyntheticSequence truth(shape_, random_.Bits());
  Append(sequence, truth, 96);
  const std::vector<std::uint32_t> ids(96, 7);
  ASSERT_TRUE(sequence.ObserveTokens(0, ids).ok());
  Compress(sequence);
  const v1::DescribeResponse held = Entries(sequence);
  EXPECT_LT(held.tokens_kept(), 0.7);
  // The weights and positions on the device agree with the daemon's lists, so attention sums to
  // one.
  std::vector<float> output(shape_.query_row());
  std::vector<float> lse(shape_.query_heads);
  const std::vector<std::uint16_t> nothing(shape_.query_row());
  const client::AttendQuery asked[] = {{.sequence = &sequence,
                                        .query = BytesOf(nothing),
                                        .output = WritableBytesOf(output),
                                        .lse = lse}};
  ASSERT_TRUE(mapped_->AttendRpc(0, asked, {}).ok());
  // For a zero query only the entries' weights count, and they add up to the number of tokens.
  for (const float value : lse) EXPECT_NEAR(value, std::log(96.0), 1e-3);
}

// A prompt that is robust against rounding: every query separates the grades of keys by some
// percent, and keys of one direction are far more similar than keys of two.
class GradedPrompt {
 public:
  GradedPrompt(const SyntheticShape& shape, TestRandom& random) : shape_(shape) {
    std::vector<std::uint32_t> chunks(kTokens / 4);
    std::iota(chunks.begin(), chunks.end(), 0u);
    const auto row = [&](std::vector<std::uint16_t>& rows) {
      rows.resize(rows.size() + shape.head_dim);
      return std::span(rows).last(shape.head_dim);
    };
    std::vector<std::vector<std::uint32_t>> orders;
    for (std::uint32_t head = 0; head < shape.kv_heads; ++head) {
      for (std::size_t i = chunks.size(); i > 1; --i) {
        std::swap(chunks[i - 1], chunks[random.Below(i)]);
      }
      orders.push_back(chunks);
    }
    for (std::uint32_t token = 0; token < kTokens; ++token) {
      for (const std::vector<std::uint32_t>& order : orders) {
        const std::uint32_t grade = 4 * order[token / 4] + token % 4;
        const auto key = row(keys_);
        key[0] = kernels::FloatToBf16(static_cast<float>(grade / 16));
        key[1] = kernels::FloatToBf16(static_cast<float>(grade % 16));
        key[8 + random.Below(5)] = kernels::FloatToBf16(40);
        const auto value = row(values_);
        value[0] = kernels::FloatToBf16(static_cast<float>(token));
      }
      for (std::uint32_t head = 0; head < shape.query_heads; ++head) {
        const auto times = static_cast<float>(random.Between(1, 3));
        const auto query = row(queries_);
        query[0] = kernels::FloatToBf16(8 * times);
        query[1] = kernels::FloatToBf16(times / 2);
      }
    }
  }

  void AppendTo(client::Sequence& sequence) const {
    const auto held =
        sequence.Append({.key = BytesOf(keys_), .value = BytesOf(values_), .tokens = kTokens});
    ASSERT_TRUE(held.ok()) << held.status();
    const absl::Status seen =
        sequence.Observe({.layer = 0, .query = BytesOf(queries_), .key = BytesOf(keys_)});
    ASSERT_TRUE(seen.ok()) << seen;
    const std::vector<std::uint32_t> ids(kTokens, 7);
    (void)sequence.ObserveTokens(0, ids);  // not every policy needs them
  }

  // Decodes token by token and attends to each; provides no other observations.
  void Decode(client::Worker& worker, client::Sequence& sequence) const {
    const auto row = [&](const std::vector<std::uint16_t>& rows, std::uint64_t token) {
      const std::size_t size = rows.size() / kTokens;
      return std::as_bytes(std::span(rows).subspan(token * size, size));
    };
    client::Sequence* const batch[] = {&sequence};
    std::vector<float> output(shape_.query_row());
    for (std::uint64_t token = 0; token < kTokens;) {
      auto step = worker.BeginStep(batch);
      ASSERT_TRUE(step.ok()) << step.status();
      const absl::Status attended = step->AppendAndAttend(0, {.key = row(keys_, token),
                                                              .value = row(values_, token),
                                                              .query = row(queries_, token),
                                                              .output = WritableBytesOf(output)});
      ASSERT_TRUE(attended.ok()) << attended;
      const absl::Status status = step->End();
      if (absl::IsAborted(status)) continue;
      ASSERT_TRUE(status.ok()) << status;
      ++token;
    }
  }

  static constexpr std::uint64_t kTokens = 120;

 private:
  const SyntheticShape shape_;
  std::vector<std::uint16_t> keys_;
  std::vector<std::uint16_t> values_;
  std::vector<std::uint16_t> queries_;
};

class ChoicesOnGpu : public TokensOnGpu {
 protected:
  void SetUp() override {
    TokensOnGpu::SetUp();
    Shape({.layers = 1, .query_heads = 4, .kv_heads = 2, .head_dim = 64});
    cpu_daemon_ = DaemonProcess::Start({});
    ASSERT_NE(cpu_daemon_, nullptr);
    auto worker = client::Worker::Attach({.address = cpu_daemon_->address()});
    ASSERT_TRUE(worker.ok()) << worker.status();
    cpu_worker_ = *std::move(worker);
    const auto model = cpu_worker_->RegisterModel(shape_.Geometry());
    ASSERT_TRUE(model.ok()) << model.status();
    cpu_model_ = *model;
  }
  client::Sequence NewOnCpu(const std::string& policy) {
    auto sequence = cpu_worker_->CreateSequence(cpu_model_, policy);
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    return *std::move(sequence);
  }
  void ExpectAlike(const client::Sequence& on_gpu, const client::Sequence& on_cpu) {
    const v1::DescribeResponse gpu = Entries(on_gpu);
    const v1::DescribeResponse cpu = Entries(on_cpu);
    for (std::uint32_t head = 0; head < shape_.kv_heads; ++head) {
      EXPECT_LT(Lane(cpu, 0, head).entries(), GradedPrompt::kTokens);
      EXPECT_THAT(Lane(gpu, 0, head).position(), ElementsAreArray(Lane(cpu, 0, head).position()));
      EXPECT_THAT(Lane(gpu, 0, head).weight(), ElementsAreArray(Lane(cpu, 0, head).weight()));
    }
  }

  std::unique_ptr<DaemonProcess> cpu_daemon_;
  std::unique_ptr<client::Worker> cpu_worker_;
  client::Model cpu_model_;
};

TEST_F(ChoicesOnGpu, AreThoseOfTheCpu) {
  for (const std::string& policy :
       {std::string("snapkv:tokens=40,window=8,kernel=1"),
        "snapkv:tokens=40,window=8,kernel=1" + kAllChannels,
        std::string("pyramidkv:tokens=50,window=8,kernel=1"),
        std::string("chunkkv:tokens=40,window=8,chunk=4"),
        std::string(
            "semantickv:sink=4,recent_ratio=0.05,keep_total=0.3,lambda=0.1,mask=none,norm=fixed"),
        std::string("semanticache:tau=0.5,sink=2,recent=4,max_chunk=32"),
        std::string("h2o:heavy=30,recent=10"), std::string("tova:budget=40")}) {
    SCOPED_TRACE(policy);
    const GradedPrompt prompt(shape_, random_);
    client::Sequence on_gpu = NewSequence(policy);
    client::Sequence on_cpu = NewOnCpu(policy);
    for (client::Sequence* sequence : {&on_gpu, &on_cpu}) {
      ASSERT_NO_FATAL_FAILURE(prompt.AppendTo(*sequence));
      Compress(*sequence);
    }
    ExpectAlike(on_gpu, on_cpu);
  }
}

// Uses the queries of the attended steps, on both devices.
TEST_F(ChoicesOnGpu, AreThoseOfTheCpuWhileDecoding) {
  for (const std::string policy : {"h2o:heavy=30,recent=10", "tova:budget=40"}) {
    SCOPED_TRACE(policy);
    const GradedPrompt prompt(shape_, random_);
    client::Sequence on_gpu = NewSequence(policy);
    client::Sequence on_cpu = NewOnCpu(policy);
    ASSERT_NO_FATAL_FAILURE(prompt.Decode(*mapped_, on_gpu));
    ASSERT_NO_FATAL_FAILURE(prompt.Decode(*cpu_worker_, on_cpu));
    for (client::Sequence* sequence : {&on_gpu, &on_cpu}) {
      ASSERT_TRUE(sequence->Park().ok());
      Compress(*sequence);
    }
    ExpectAlike(on_gpu, on_cpu);
    EXPECT_EQ(Lane(Entries(on_cpu), 0).entries(), 40u);
  }
}

class RowsOnGpu : protected WithEmulatedGpu, public RowLanes {
 protected:
  RowsOnGpu() : RowLanes(gpu.StartDaemon({"--device=cuda:0"}), &gpu.platform) {}
};

TEST_F(RowsOnGpu, AreReadFromItsMemory) {
  Shape({.layers = 1, .query_heads = 2, .kv_heads = 2, .head_dim = 64});
  for (const std::string& policy :
       {std::string("dense"), "snapkv:budget=0.3,window=16" + kAllChannels,
        std::string("mosaickv:keep=0.25,loss_k=1,loss_v=1,recent=0,min_segment=32+int8"),
        std::string("semanticache:tau=0,sink=0,recent=0")}) {
    SCOPED_TRACE(policy);
    client::Sequence sequence = NewSequence(policy);
    SyntheticSequence truth(shape_, random_.Bits());
    Append(sequence, truth, 150);
    ASSERT_TRUE(sequence.ObserveTokens(0, std::vector<std::uint32_t>(150, 7)).ok());
    Compress(sequence);
    for (int i = 0; i < 5; ++i) Decode(sequence, truth);
    ASSERT_NO_FATAL_FAILURE(ExpectDescribed(sequence));
    EXPECT_LE(Difference(sequence, truth), 0.015);
    if (policy != "dense") continue;
    for (const LaneRows& lane : Read(sequence, {}).lanes) {
      ASSERT_EQ(lane.positions.size(), 155u);
      for (std::size_t e = 0; e < 155; ++e) {
        const auto key = truth.Key(0, e, 1).subspan(std::size_t{lane.kv_head} * 64, 64);
        ASSERT_EQ(std::memcmp(lane.key.data() + e * 128, key.data(), 128), 0) << e;
      }
    }
  }
}

}  // namespace
}  // namespace tessera
