// Compression through the C interface gives the same result for a prompt as through the C++ one.

#include <string>

#include "tessera/tessera.h"
#include "tests/e2e/tokens/token_lanes.h"

namespace tessera {
namespace {

constexpr std::uint64_t kPrompt = 200;

class CInterface : public Tokens {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(Tokens::SetUp());
    Shape({.layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 64});
    const std::string address = daemon_->address();
    tessera_attach_options attach = TESSERA_ATTACH_OPTIONS_INIT;
    attach.address = address.c_str();
    ASSERT_EQ(tessera_attach(&attach, &worker_, &error_), TESSERA_OK) << error_.message;
    const tessera_layer layer = {.query_heads = shape_.query_heads,
                                 .kv_heads = shape_.kv_heads,
                                 .head_dim = shape_.head_dim,
                                 .scale = 0,
                                 .sliding_window = 0,
                                 .logit_softcap = 0,
                                 .sinks = nullptr};
    const std::vector<tessera_layer> layers(shape_.layers, layer);
    tessera_model_options geometry = TESSERA_MODEL_OPTIONS_INIT;
    const client::ModelGeometry same = shape_.Geometry();
    geometry.name = same.name.c_str();
    geometry.layers = layers.data();
    geometry.layer_count = layers.size();
    geometry.rope_theta = same.rope.theta;
    geometry.delimiter_token_ids = same.delimiter_token_ids.data();
    geometry.delimiter_count = same.delimiter_token_ids.size();
    ASSERT_EQ(tessera_register_model(worker_, &geometry, &c_model_, &error_), TESSERA_OK)
        << error_.message;
  }
  void TearDown() override {
    tessera_model_destroy(c_model_);
    tessera_detach(worker_);
  }

  tessera_sequence* Create(const char* policy) {
    tessera_sequence* sequence = nullptr;
    EXPECT_EQ(tessera_sequence_create(worker_, c_model_, policy, &sequence, &error_), TESSERA_OK)
        << error_.message;
    return sequence;
  }
  void AppendPrompt(tessera_sequence* sequence, const SyntheticSequence& truth) {
    const auto key = truth.KeysOfAllLayers(0, kPrompt);
    const auto value = truth.ValuesOfAllLayers(0, kPrompt);
    tessera_append append = TESSERA_APPEND_INIT;
    append.key = key.data();
    append.value = value.data();
    append.bytes = key.size() * sizeof(key[0]);
    append.tokens = kPrompt;
    ASSERT_EQ(tessera_sequence_append(sequence, &append, nullptr, &error_), TESSERA_OK)
        << error_.message;
  }
  void ShowPrompt(tessera_sequence* sequence, const SyntheticSequence& truth, bool keys) {
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      std::vector<std::uint16_t> queries;
      for (std::uint64_t t = 0; t < kPrompt; ++t) {
        const auto row = truth.Query(layer, t);
        queries.insert(queries.end(), row.begin(), row.end());
      }
      const auto rows = truth.Key(layer, 0, kPrompt);
      tessera_observation shown = TESSERA_OBSERVATION_INIT;
      shown.layer = layer;
      shown.query = queries.data();
      shown.query_bytes = queries.size() * sizeof(queries[0]);
      if (keys) {
        shown.key = rows.data();
        shown.key_bytes = rows.size() * sizeof(rows[0]);
      }
      ASSERT_EQ(tessera_sequence_observe(sequence, &shown, &error_), TESSERA_OK) << error_.message;
    }
  }

  tessera_worker* worker_ = nullptr;
  tessera_model* c_model_ = nullptr;
  tessera_error error_ = {};
};

TEST_F(CInterface, PoliciesChooseTheSameByIt) {
  std::vector<std::uint32_t> ids(kPrompt);
  for (std::uint32_t& id : ids) id = static_cast<std::uint32_t>(random_.Below(10));
  for (const char* policy :
       {"snapkv:budget=0.5,window=8", "semantickv:keep_total=0.6,sink=8,recent_ratio=0.1",
        "h2o:heavy=30,recent=30", "semanticache:tau=0.3", "streaming:sink=4,recent=60"}) {
    SCOPED_TRACE(policy);
    client::Sequence expected = NewSequence(policy);
    SyntheticSequence truth(shape_, random_.Bits());
    Append(expected, truth, kPrompt);
    ASSERT_TRUE(expected.ObserveTokens(0, ids).ok());
    Compress(expected);

    tessera_sequence* made = Create(policy);
    EXPECT_EQ(std::string(tessera_sequence_policy(made)), expected.policy());
    tessera_needs needs = {};
    needs.struct_size = sizeof needs;
    ASSERT_EQ(tessera_sequence_needs(made, &needs, &error_), TESSERA_OK);
    const std::string name = std::string(policy).substr(0, std::string(policy).find(':'));
    EXPECT_EQ(needs.queries, name != "streaming" && name != "semanticache");
    EXPECT_EQ(needs.keys, name == "h2o");
    EXPECT_EQ(needs.token_ids, name == "semanticache");
    EXPECT_EQ(needs.while_decoding, name == "h2o" || name == "streaming");
    AppendPrompt(made, truth);
    if (needs.queries) ShowPrompt(made, truth, needs.keys);
    if (needs.token_ids) {
      ASSERT_EQ(tessera_sequence_observe_tokens(made, 0, ids.data(), ids.size(), &error_),
                TESSERA_OK);
    }
    ASSERT_EQ(tessera_sequence_compress(made, &error_), TESSERA_OK) << error_.message;

    const std::uint64_t id = tessera_sequence_id(made);
    ASSERT_EQ(tessera_sequence_handover(made, mapped_->session_id().value(), &error_), TESSERA_OK)
        << error_.message;
    tessera_sequence_destroy(made);
    const auto adopted = mapped_->Adopt(model_, client::SequenceId(id));
    ASSERT_TRUE(adopted.ok()) << adopted.status();
    const v1::DescribeResponse held = Entries(*adopted);
    const v1::DescribeResponse wanted = Entries(expected);
    ASSERT_EQ(held.lane_size(), wanted.lane_size());
    EXPECT_LT(held.lane(0).position_size(), static_cast<int>(kPrompt));
    for (int lane = 0; lane < held.lane_size(); ++lane) {
      EXPECT_THAT(held.lane(lane).position(), ElementsAreArray(wanted.lane(lane).position()));
    }
  }
}

TEST_F(CInterface, SequencesGoOutAndComeBackAndForkUnderOtherPolicies) {
  SyntheticSequence truth(shape_, random_.Bits());
  truth.Grow(kPrompt);
  tessera_sequence* sequence = Create("dense");
  AppendPrompt(sequence, truth);
  EXPECT_EQ(tessera_sequence_next_position(sequence), kPrompt);
  tessera_sequence_info info = {};
  info.struct_size = sizeof info;
  uint64_t moved = 0;
  ASSERT_EQ(tessera_sequence_offload(sequence, &moved, &error_), TESSERA_OK) << error_.message;
  EXPECT_GT(moved, 0u);
  ASSERT_EQ(tessera_sequence_describe(sequence, &info, &error_), TESSERA_OK);
  EXPECT_EQ(info.tile_bytes, 0u);
  EXPECT_GT(info.offloaded_bytes, 0u);
  ASSERT_EQ(tessera_sequence_restore(sequence, &error_), TESSERA_OK) << error_.message;
  ASSERT_EQ(tessera_sequence_describe(sequence, &info, &error_), TESSERA_OK);
  EXPECT_GT(info.tile_bytes, 0u);
  EXPECT_GE(moved, info.tile_bytes);  // plus their tables
  EXPECT_EQ(info.offloaded_bytes, 0u);
  EXPECT_EQ(info.rotation_bytes, 0u);

  tessera_sequence* packed = nullptr;
  ASSERT_EQ(tessera_sequence_fork_as(sequence, "mosaickv:keep=0.25,loss_k=1,loss_v=1,recent=0",
                                     &packed, &error_),
            TESSERA_OK)
      << error_.message;
  ASSERT_EQ(tessera_sequence_compress(packed, &error_), TESSERA_OK) << error_.message;
  ASSERT_EQ(tessera_sequence_describe(packed, &info, &error_), TESSERA_OK);
  EXPECT_LT(info.tile_bytes, moved / 2);
  EXPECT_GT(info.rotation_bytes, 0u);

  tessera_sequence* none = nullptr;
  EXPECT_EQ(tessera_sequence_fork_as(sequence, "mosaic", &none, &error_), TESSERA_INVALID_ARGUMENT);
  EXPECT_THAT(error_.message, HasSubstr("mosaickv"));
  EXPECT_EQ(none, nullptr);
  tessera_observation shown = TESSERA_OBSERVATION_INIT;
  shown.layer = 99;
  tessera_sequence* choosing = Create("snapkv:budget=0.5");
  EXPECT_NE(tessera_sequence_observe(choosing, &shown, &error_), TESSERA_OK);
  for (tessera_sequence* each : {sequence, packed, choosing}) tessera_sequence_destroy(each);
}

}  // namespace
}  // namespace tessera
