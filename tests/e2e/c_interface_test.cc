// Compression through the C interface gives the same result for a prompt as through the C++ one.

#include <string>

#include "tests/e2e/c_worker.h"

namespace tessera {
namespace {

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
