// Rows read back: dense ones bit for bit, all others as attention sees them.

#include <gmock/gmock.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "tests/e2e/row_lanes.h"
#include "tests/fakes/raw_worker.h"

namespace tessera {
namespace {

class Rows : public RowLanes {
 protected:
  // Small messages: reads need several.
  Rows() : RowLanes(DaemonProcess::Start({.flags = {"--max-message-bytes=64KiB"}}), nullptr) {}
};

// Through both transports, in several messages, with a tail and without.
TEST_F(Rows, DenseOnesComeBackBitForBit) {
  Shape({.layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 128});
  client::Sequence sequence = NewSequence("dense");
  SyntheticSequence truth(shape_, random_.Bits());
  Append(sequence, truth, 400);
  for (int i = 0; i < 45; ++i) Decode(sequence, truth);
  const std::size_t row = shape_.head_dim * sizeof(std::uint16_t);
  for (int i = 0; i < 30; ++i) {
    RowRange range = {.layer = static_cast<std::uint32_t>(random_.Below(shape_.layers))};
    if (random_.OneIn(2)) range.first_kv_head = 1;
    if (random_.OneIn(3)) range.kv_heads = 1;
    if (random_.OneIn(2)) range.first_entry = random_.Below(500);
    if (random_.OneIn(2)) range.entries = random_.Between(1, 300);
    if (random_.OneIn(3)) range.type = ElementType::kFp32;
    if (i == 20) {
      ASSERT_TRUE(sequence.Park().ok());
    }
    const SequenceRows rows = Read(sequence, range);
    EXPECT_EQ(rows.tokens, truth.tokens());
    EXPECT_EQ(rows.type, range.type.value_or(ElementType::kBf16));
    const std::uint32_t left = shape_.kv_heads - range.first_kv_head;
    ASSERT_EQ(rows.lanes.size(), range.kv_heads == 0 ? left : range.kv_heads);
    for (const LaneRows& lane : rows.lanes) {
      EXPECT_EQ(lane.lane_entries, truth.tokens());
      const std::uint64_t begin = std::min<std::uint64_t>(range.first_entry, truth.tokens());
      const std::uint64_t all = truth.tokens() - begin;
      const std::uint64_t count = range.entries == 0 ? all : std::min(range.entries, all);
      ASSERT_EQ(lane.positions.size(), count);
      EXPECT_TRUE(lane.weights.empty());
      for (std::uint64_t e = 0; e < count; ++e) {
        ASSERT_EQ(lane.positions[e], begin + e);
        for (const bool value : {false, true}) {
          const auto from =
              value ? truth.Value(range.layer, begin + e, 1) : truth.Key(range.layer, begin + e, 1);
          const auto exact =
              from.subspan(std::size_t{lane.kv_head} * shape_.head_dim, shape_.head_dim);
          const std::vector<std::byte>& got = value ? lane.value : lane.key;
          if (rows.type == ElementType::kBf16) {
            ASSERT_EQ(std::memcmp(got.data() + e * row, exact.data(), row), 0) << begin + e;
            continue;
          }
          const auto floats = Floats(std::span(got).subspan(e * 2 * row, 2 * row));
          for (std::uint32_t d = 0; d < shape_.head_dim; ++d) {
            ASSERT_EQ(floats[d], kernels::Bf16ToFloat(exact[d])) << begin + e;
          }
        }
      }
    }
  }
}

struct Kept {
  const char* policy;
  double tolerance = 1e-3;
};
// Kernels may round queries and shares of packed rows to bf16; wrong rows are much farther off.
constexpr double kPacked = 0.015;

class EveryPolicy : public Rows, public testing::WithParamInterface<Kept> {};

TEST_P(EveryPolicy, HasTheRowsThatItsAttentionSees) {
  shape_ = {.layers = 4, .query_heads = 4, .kv_heads = 2, .head_dim = 64};
  client::ModelGeometry geometry = shape_.Geometry();
  geometry.rope.theta = 10000;  // for policies that move positions
  const auto model = mapped_->RegisterModel(geometry);
  ASSERT_TRUE(model.ok()) << model.status();
  model_ = *model;
  client::Sequence sequence = NewSequence(GetParam().policy);
  SyntheticSequence truth(shape_, random_.Bits());
  Append(sequence, truth, 600);
  ASSERT_TRUE(sequence.ObserveTokens(0, std::vector<std::uint32_t>(600, 7)).ok());
  Compress(sequence);
  ASSERT_NO_FATAL_FAILURE(ExpectDescribed(sequence));
  EXPECT_LE(Difference(sequence, truth), GetParam().tolerance);
  if (std::string(GetParam().policy).find("semanticache") != std::string::npos) {
    EXPECT_FALSE(Read(sequence, {}).lanes[0].weights.empty());
  } else {
    for (int i = 0; i < 40; ++i) DecodeAndAttend(sequence, truth);
    ASSERT_TRUE(sequence.Park().ok());  // waits until the daemon has taken the tail over
    Compress(sequence);
    ASSERT_NO_FATAL_FAILURE(ExpectDescribed(sequence));
    EXPECT_LE(Difference(sequence, truth), GetParam().tolerance);
  }
  // A sequence in the host tier is restored first.
  ASSERT_TRUE(sequence.Offload().ok());
  EXPECT_LE(Difference(sequence, truth), GetParam().tolerance);
}

INSTANTIATE_TEST_SUITE_P(
    Policies, EveryPolicy,
    testing::Values(
        Kept{"dense"}, Kept{"quest:tokens=96,page=8,dense_layers=0"},
        Kept{"mosaickv:keep=0.25,loss_k=1,loss_v=1,recent=0,min_segment=32", kPacked},
        Kept{"mosaickv:keep=0.25,loss_k=1,loss_v=1,recent=32,min_segment=32,select=0.3+int8",
             kPacked},
        Kept{"mosaickv:keep=0.5,group=2,loss_k=1,loss_v=1,min_segment=32+fp8", kPacked},
        Kept{"mosaickv:keep=0.5,loss_k=1,loss_v=1,min_segment=32+fp16", kPacked},
        // Attention over planes rounds the query to 8 bits.
        Kept{"planes:book_rows=256,recent=32", 0.05}, Kept{"think:recent_size=8", kPacked},
        Kept{"chunkkv:budget=0.4,window=16"}, Kept{"semantickv:keep_total=0.4,sink=8,lambda=0.05"},
        Kept{"semanticache:tau=0.05,sink=4,recent=16"},
        Kept{"semanticache:tau=0.05,sink=4,recent=16+mosaickv:keep=0.5,loss_k=1,loss_v=1,"
             "min_segment=32+int8",
             kPacked},
        Kept{"lacache:budget=240,span=2,sink=4"}, Kept{"lacache:budget=240,span=2,sink=4,pos=slot"},
        Kept{"streaming:sink=4,recent=236"}, Kept{"h2o:heavy=120,recent=120"},
        Kept{"snapkv:budget=0.4,window=16+mosaickv:keep=0.25,loss_k=1,loss_v=1,min_segment=32",
             kPacked},
        Kept{"pyramidkv:budget=0.4,window=16"}, Kept{"tova:budget=240"}),
    [](const auto& one) {
      std::string name = one.param.policy;
      std::replace_if(
          name.begin(), name.end(), [](char c) { return !std::isalnum(c); }, '_');
      return name;
    });

// Codes lose a few percent of a row's energy; codes that are read wrongly lose most of it.
TEST_F(Rows, PlanesAreNearTheRowsTheyCode) {
  Shape({.layers = 1, .query_heads = 2, .kv_heads = 2, .head_dim = 128});
  client::Sequence sequence = NewSequence("planes:book_rows=256,recent=32");
  SyntheticSequence truth(shape_, random_.Bits());
  Append(sequence, truth, 600);
  Compress(sequence);
  for (const LaneRows& lane : Read(sequence, {.type = ElementType::kFp32}).lanes) {
    ASSERT_EQ(lane.positions.size(), 600u);
    for (const bool value : {false, true}) {
      const std::vector<float> rows = Floats(value ? lane.value : lane.key);
      double error = 0;
      double energy = 0;
      for (std::size_t e = 0; e < 600; ++e) {
        const auto exact = (value ? truth.Value(0, e, 1) : truth.Key(0, e, 1))
                               .subspan(std::size_t{lane.kv_head} * 128, 128);
        for (std::size_t d = 0; d < 128; ++d) {
          const double wanted = kernels::Bf16ToFloat(exact[d]);
          error += (rows[e * 128 + d] - wanted) * (rows[e * 128 + d] - wanted);
          energy += wanted * wanted;
        }
      }
      EXPECT_GT(error, 0) << "nothing was coded";
      EXPECT_LE(error, 0.03 * energy);
    }
  }
}

TEST_F(Rows, RefusesWhatItCannotRead) {
  Shape({.layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 64});
  client::Sequence sequence = NewSequence("dense");
  SyntheticSequence truth(shape_, random_.Bits());
  EXPECT_TRUE(Read(sequence, {}).lanes[1].key.empty());
  Append(sequence, truth, 300);
  const auto refused = [&](const RowRange& range) { return sequence.Read(range).status(); };
  EXPECT_THAT(refused({.layer = 2}).message(), HasSubstr("layer is 2; the model has 2 layers"));
  EXPECT_THAT(refused({.first_kv_head = 2}).message(), HasSubstr("layer 0 has 2"));
  EXPECT_THAT(refused({.first_kv_head = 1, .kv_heads = 2}).message(), HasSubstr("has 2"));
  EXPECT_THAT(refused({.type = ElementType::kFp16}).message(),
              HasSubstr("dtype is fp16; use fp32 or the model's type, bf16"));
  EXPECT_TRUE(absl::IsInvalidArgument(client::Sequence().Read({}).status()));
  client::Sequence* const batch[] = {&sequence};
  auto step = mapped_->BeginStep(batch);
  ASSERT_TRUE(step.ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(refused({})));
  step->Abandon();
  EXPECT_EQ(Read(sequence, {}).lanes[0].positions.size(), 300u);

  fakes::RawWorker raw(daemon_->Connect());
  ASSERT_TRUE(raw.Attach().ok());
  v1::ReadRequest request;
  request.set_sequence_id(sequence.id().value());
  request.set_first_kv_head(9);
  v1::ReadResponse response;
  EXPECT_THAT(raw.Read(request, &response).error_message(), HasSubstr("first_kv_head is 9"));
  request.set_first_kv_head(1);
  request.set_kv_heads(0xffffffff);
  EXPECT_EQ(raw.Read(request, &response).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  request.clear_first_kv_head();
  request.clear_kv_heads();
  EXPECT_THAT(raw.Read(request, &response).error_message(),
              HasSubstr("max_message_bytes is 65536; ask for fewer entries or kv heads"));
  request.set_first_entry(~std::uint64_t{0});
  request.set_entries(~std::uint64_t{0});
  ASSERT_TRUE(raw.Read(request, &response).ok());
  EXPECT_EQ(response.lanes(0).lane_entries(), 300u);
  EXPECT_EQ(response.lanes(0).position_size(), 0);
  ASSERT_TRUE(sequence.Free().ok());
  EXPECT_EQ(raw.Read(request, &response).error_code(), grpc::StatusCode::NOT_FOUND);
}

}  // namespace
}  // namespace tessera
