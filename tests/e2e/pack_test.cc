// Packed lanes end to end: the daemon encodes, and both transports attend over the result, with and
// without a selection. Geometries, packings and rows are random.

#include <gmock/gmock.h>

#include <string>
#include <vector>

#include "client/api/worker_access.h"
#include "client/cli/state.h"
#include "client/tools/admin.h"
#include "tests/e2e/packed_lanes.h"

namespace tessera {
namespace {

TEST_F(PackedLanes, BothTransportsGiveTheSameBits) {
  for (int story = 0; story < 4; ++story) {
    client::Sequence sequence = NewSequence(*mapped_);
    SyntheticSequence truth(shape_, random_.Bits());
    const int parts = static_cast<int>(random_.Between(1, 3));
    for (int part = 0; part < parts; ++part) {
      Append(sequence, truth, random_.Between(1, 150));
      Rotated rotated;
      const Packing packing = RandomPacking(&rotated);
      ASSERT_TRUE(Compress(sequence, packing, rotated));
    }
    if (random_.OneIn(2)) Append(sequence, truth, random_.Between(1, 40));
    for (int step = 0; step < 6; ++step) {
      std::optional<SelectionRule> rule;
      if (step % 2 == 1) rule = RandomRule();
      const std::vector<Output> by_step = Decode(*mapped_, sequence, truth, rule);
      for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
        const Output by_rpc = ByRpc(*mapped_, sequence, truth, layer, truth.tokens() - 1, rule);
        ASSERT_TRUE(by_step[layer] == by_rpc)
            << "layer " << layer << " of " << truth.tokens() << " tokens, "
            << (rule.has_value() ? "selected" : "all");
      }
    }
  }
}

// More work than the daemon does under one pin. Without a selection the call is split; with one it
// must not be, since all queries share a selection.
TEST_F(PackedLanes, AChunkOfQueriesGivesTheSameBitsOverBothTransports) {
  constexpr std::uint32_t kTokens = 96;
  shape_ = {.layers = 1, .query_heads = 16, .kv_heads = 2, .head_dim = 64};
  model_ = *mapped_->RegisterModel(shape_.Geometry());
  client::Sequence sequence = NewSequence(*mapped_);
  SyntheticSequence truth(shape_, random_.Bits());
  for (int segment = 0; segment < 8; ++segment) {
    Append(sequence, truth, random_.Between(20, 60));
    const Packing packing = {.kept_channels = 24, .summary = Summary::kMean, .block = 8};
    ASSERT_TRUE(Compress(sequence, packing, {}));
  }
  const std::uint64_t first = truth.tokens();
  truth.Grow(kTokens);
  std::vector<std::uint16_t> queries;
  for (std::uint64_t token = first; token < first + kTokens; ++token) {
    const std::vector<std::uint16_t> query = truth.Query(0, token);
    queries.insert(queries.end(), query.begin(), query.end());
  }
  client::Sequence* const batch[] = {&sequence};
  auto step = mapped_->BeginStep(batch, {.new_tokens = kTokens});
  ASSERT_TRUE(step.ok()) << step.status();
  // The chunk's own keys are not appended yet, so only segments are read.
  for (const bool selects : {false, true}) {
    const std::optional<SelectionRule> rule =
        selects ? std::optional(SelectionRule{.rate = 0.2}) : std::nullopt;
    Output by_step = NewOutput(kTokens);
    Output by_rpc = NewOutput(kTokens);
    const absl::Status status = step->Attend(0, {.query = BytesOf(queries),
                                                 .output = WritableBytesOf(by_step.output),
                                                 .lse = by_step.lse,
                                                 .selection = rule});
    ASSERT_TRUE(status.ok()) << status;
    const client::AttendQuery asked[] = {{.sequence = &sequence,
                                          .queries = kTokens,
                                          .query = BytesOf(queries),
                                          .output = WritableBytesOf(by_rpc.output),
                                          .lse = by_rpc.lse,
                                          .first_query_position = first}};
    const absl::Status attended = mapped_->AttendRpc(0, asked, {.selection = rule});
    ASSERT_TRUE(attended.ok()) << attended;
    EXPECT_TRUE(by_step == by_rpc) << (selects ? "selected" : "all");
  }
}

TEST_F(PackedLanes, ARemoteWorkerDecodesTheSame) {
  client::Sequence sequence = NewSequence(*remote_);
  SyntheticSequence truth(shape_, random_.Bits());
  Append(sequence, truth, random_.Between(20, 200));
  Packing packing = {.kept_channels = shape_.head_dim, .summary = Summary::kMean};
  ASSERT_TRUE(Compress(sequence, packing, {}));
  for (int step = 0; step < 3; ++step) {
    const std::vector<Output> outputs = Decode(*remote_, sequence, truth, std::nullopt);
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      EXPECT_LT(truth.Error(layer, truth.tokens() - 1, outputs[layer].output), 0.02);
    }
    const SelectionRule all = {.entries = 100000};
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      const Output selected = ByRpc(*remote_, sequence, truth, layer, truth.tokens() - 1, all);
      EXPECT_LT(truth.Error(layer, truth.tokens() - 1, selected.output), 0.02);
    }
  }
}

// With all channels kept and no rotation, bf16 rows are unchanged. But kernels that multiply bf16
// pairs round queries and weights to bf16: about 2^-9 of logits and outputs near 1.
constexpr double kRounding = 0.01;

TEST_F(PackedLanes, KeepingEveryChannelIsDenseAttentionWithinRounding) {
  client::Sequence sequence = NewSequence(*mapped_);
  SyntheticSequence truth(shape_, random_.Bits());
  Append(sequence, truth, random_.Between(1, 300));
  const std::uint64_t last = truth.tokens() - 1;
  std::vector<Output> dense;
  for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
    dense.push_back(ByRpc(*mapped_, sequence, truth, layer, last, std::nullopt));
  }
  Packing packing = {.kept_channels = shape_.head_dim, .group = 1u << random_.Below(3)};
  client::CompressResult response;
  ASSERT_TRUE(Compress(sequence, packing, {}, &response));
  EXPECT_EQ(response.entries_packed, truth.tokens() * shape_.layers * shape_.kv_heads);
  EXPECT_EQ(response.rotation_bytes, 0u);
  for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
    const Output packed = ByRpc(*mapped_, sequence, truth, layer, last, std::nullopt);
    for (std::size_t i = 0; i < packed.output.size(); ++i) {
      ASSERT_NEAR(packed.output[i], dense[layer].output[i], kRounding) << i;
    }
    for (std::size_t i = 0; i < packed.lse.size(); ++i) {
      ASSERT_NEAR(packed.lse[i], dense[layer].lse[i], kRounding) << i;
    }
  }
}

TEST_F(PackedLanes, RotationsThatKeepEverythingCostRoundingAlone) {
  client::Sequence sequence = NewSequence(*mapped_);
  SyntheticSequence truth(shape_, random_.Bits());
  Append(sequence, truth, random_.Between(30, 200));
  Packing packing = {.kept_channels = shape_.head_dim};
  const Rotated rotated = RandomRotations(packing);
  client::CompressResult response;
  ASSERT_TRUE(Compress(sequence, packing, rotated, &response));
  EXPECT_EQ(response.rotation_bytes, rotated.key.size() + rotated.value.size());
  const std::vector<Output> outputs = Decode(*mapped_, sequence, truth, std::nullopt);
  for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
    EXPECT_LT(truth.Error(layer, truth.tokens() - 1, outputs[layer].output), 0.05);
  }
}

TEST_F(PackedLanes, ForkTruncateAppendAndTailAfterPacking) {
  client::Sequence parent = NewSequence(*mapped_);
  SyntheticSequence truth(shape_, random_.Bits());
  Append(parent, truth, random_.Between(50, 120));
  const Packing packing = {.kept_channels = shape_.head_dim,
                           .summary = Summary::kMinMax,
                           .block = 4u << random_.Below(3)};
  ASSERT_TRUE(Compress(parent, packing, {}));
  const auto check = [&](client::Sequence& sequence, SyntheticSequence& of) {
    const SelectionRule all = {.entries = 100000};  // more than it holds
    for (const auto& rule : {std::optional<SelectionRule>(), std::optional(all)}) {
      const std::vector<Output> outputs = Decode(*mapped_, sequence, of, rule);
      for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
        ASSERT_LT(of.Error(layer, of.tokens() - 1, outputs[layer].output), 0.02)
            << of.tokens() << " tokens";
      }
    }
  };
  check(parent, truth);
  auto child = parent.Fork();
  ASSERT_TRUE(child.ok()) << child.status();
  SyntheticSequence other = truth.Fork(random_.Bits());
  for (int round = 0; round < 4; ++round) {
    check(parent, truth);
    check(*child, other);
    const std::uint64_t keep = random_.Between(1, other.tokens());
    ASSERT_TRUE(child->Truncate(keep).ok());
    other.Truncate(keep);
    check(*child, other);
    Append(*child, other, random_.Between(1, 60));
    check(*child, other);
    if (round % 2 == 0) {
      ASSERT_TRUE(Compress(*child, packing, {}));
    }
    for (int token = 0; token < 40; ++token) Decode(*mapped_, parent, truth, std::nullopt);
  }
  check(parent, truth);
  check(*child, other);
}

TEST_F(PackedLanes, DescribeShowsTheForm) {
  client::Sequence sequence = NewSequence(*mapped_);
  SyntheticSequence truth(shape_, random_.Bits());
  Append(sequence, truth, 70);
  const Packing packing = {.kept_channels = 16,
                           .group = 2,
                           .values = client::ValueType::kInt8,
                           .summary = Summary::kMean,
                           .block = 16};
  client::CompressResult response;
  ASSERT_TRUE(Compress(sequence, packing, RandomRotations(packing), &response));
  Append(sequence, truth, 9);
  const auto described = client::DescribeMessage(sequence, client::Detail::kLanes);
  ASSERT_TRUE(described.ok()) << described.status();
  std::uint64_t packed_bytes = 0;
  std::uint64_t rotation_bytes = 0;
  for (const v1::LaneDescription& lane : described->lane()) {
    EXPECT_EQ(lane.segments(), 2u);
    ASSERT_EQ(lane.segment_run_size(), 2);
    const v1::SegmentRun& run = lane.segment_run(0);
    EXPECT_EQ(run.format(), "packed int8");
    EXPECT_EQ(run.segments(), 1u);
    EXPECT_EQ(run.entries(), 70u);
    EXPECT_EQ(run.channels(), shape_.head_dim);
    EXPECT_EQ(run.kept_channels(), 16u);
    EXPECT_EQ(run.group(), 2u);
    EXPECT_EQ(run.summary(), v1::BLOCK_SUMMARY_MEAN);
    EXPECT_EQ(run.block(), 16u);
    packed_bytes += run.tile_bytes();
    rotation_bytes += run.rotation_bytes();
    EXPECT_EQ(lane.segment_run(1).format(), "dense bf16");
    EXPECT_EQ(lane.segment_run(1).entries(), 9u);
    EXPECT_EQ(lane.segment_run(1).kept_channels(), 0u);
    EXPECT_EQ(run.tile_bytes() + lane.segment_run(1).tile_bytes(), lane.tile_bytes());
  }
  EXPECT_EQ(packed_bytes, response.tile_bytes_after);
  EXPECT_EQ(rotation_bytes, response.rotation_bytes);

  // `tessera status` says the same for all lanes together: 70 of 79 entries are packed.
  auto admin = cli::Admin::At({.address = daemon_->address(), .tls = std::nullopt});
  ASSERT_TRUE(admin.ok()) << admin.status();
  const auto look = cli::ReadDaemonState(*admin, 10);
  ASSERT_TRUE(look.ok()) << look.status();
  EXPECT_THAT(cli::SequenceTable(*look, {}, cli::SequenceOrder::kNewest).Render(),
              testing::HasSubstr("packed int8 16/" + std::to_string(shape_.head_dim) +
                                 " g2 mean16 88%, dense bf16 11%"));
}

// Rotations too large for a message travel through the staging arena. A worker without one gets an
// error.
TEST_F(PackedLanes, LargeRotationsTravelThroughTheStagingArena) {
  const auto small = DaemonProcess::Start({.flags = {"--max-message-bytes=64KiB"}});
  ASSERT_NE(small, nullptr);
  shape_ = {.layers = 2, .query_heads = 2, .kv_heads = 2, .head_dim = 128};
  for (const bool map_memory : {true, false}) {
    auto worker = client::Worker::Attach({.address = small->address(), .map_memory = map_memory});
    ASSERT_TRUE(worker.ok()) << worker.status();
    model_ = *(*worker)->RegisterModel(shape_.Geometry());
    client::Sequence sequence = NewSequence(**worker);
    SyntheticSequence truth(shape_, random_.Bits());
    for (int i = 0; i < 4; ++i) Append(sequence, truth, 10);
    const Packing packing = {.kept_channels = 128};
    const auto compressed = sequence.Compress(packing, RandomRotations(packing).tensors());
    if (map_memory) {
      ASSERT_TRUE(compressed.ok()) << compressed.status();
      const Output output = ByRpc(**worker, sequence, truth, 1, 39, std::nullopt);
      EXPECT_LT(truth.Error(1, 39, output.output), 0.05);
    } else {
      EXPECT_EQ(compressed.status().code(), absl::StatusCode::kResourceExhausted);
      EXPECT_THAT(std::string(compressed.status().message()), testing::HasSubstr("65536"));
    }
  }
}

}  // namespace
}  // namespace tessera
