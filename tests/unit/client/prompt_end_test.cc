// What a worker is warned of about the ends of its prompts.
#include "client/sequence/prompt_end.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera::client {
namespace {

using testing::HasSubstr;
using Outcomes = google::protobuf::RepeatedPtrField<v1::OutcomeGroup>;

constexpr SequenceId kId{7};

Outcomes Of(v1::LaneState state, v1::CompressionReason reason) {
  Outcomes outcomes;
  v1::OutcomeGroup& group = *outcomes.Add();
  group.set_lanes(8);
  group.set_layer(2);
  group.mutable_worst()->set_state(state);
  group.mutable_worst()->set_reason(reason);
  group.mutable_worst()->set_text("left dense: for a reason");
  return outcomes;
}

TEST(PromptEnd, WarnsOnceWhereOnlySomeLayersHaveEnded) {
  PromptEnd end;
  EXPECT_EQ(end.BeforeDecoding(kId, 100), std::nullopt) << "nobody said anything";
  end.MarkEnded(3, 1, 100, 4, false);
  const std::optional<std::string> warning = end.BeforeDecoding(kId, 100);
  ASSERT_TRUE(warning.has_value());
  EXPECT_THAT(*warning, HasSubstr("3 of its 4 layers has not ended"));
  EXPECT_THAT(*warning, HasSubstr("layer 0"));
  EXPECT_THAT(*warning, HasSubstr("EndPrompt"));
  EXPECT_EQ(end.BeforeDecoding(kId, 101), std::nullopt);
  end.MarkEnded(3, 1, 200, 4, false);
  EXPECT_EQ(end.BeforeDecoding(kId, 200), std::nullopt) << "once for each sequence";
}

TEST(PromptEnd, IsContentWhereAllHaveEnded) {
  PromptEnd end;
  for (std::uint32_t layer = 0; layer < 4; ++layer) end.MarkEnded(layer, 1, 100, 4, false);
  EXPECT_EQ(end.BeforeDecoding(kId, 100), std::nullopt);
  end.MarkEnded(1, 0, 150, 4, false);
  end.MarkEnded(0, 1, 150, 4, false);
  EXPECT_EQ(end.BeforeDecoding(kId, 150), std::nullopt);
}

TEST(PromptEnd, LooksAgainWhileTheDaemonIsAtItAndThenGivesUp) {
  PromptEnd end;
  EXPECT_FALSE(end.IsCheckDue(1000));
  end.MarkEnded(0, 4, 100, 4, false);
  EXPECT_FALSE(end.IsCheckDue(131));
  const Outcomes waiting = Of(v1::LANE_STATE_DENSE, v1::COMPRESSION_REASON_WAITING);
  int looks = 0;
  for (std::uint64_t tokens = 100; tokens < 5000; ++tokens) {
    if (!end.IsCheckDue(tokens)) continue;
    ++looks;
    EXPECT_EQ(end.WarnAfterCheck(kId, "mosaickv", tokens, waiting), std::nullopt);
  }
  EXPECT_EQ(looks, 4);
}

TEST(PromptEnd, WarnsOnceWhereNothingWasCompressed) {
  PromptEnd end;
  end.MarkEnded(0, 4, 100, 4, false);
  ASSERT_TRUE(end.IsCheckDue(132));
  const Outcomes dense = Of(v1::LANE_STATE_DENSE, v1::COMPRESSION_REASON_LOSS_ABOVE_LIMIT);
  const std::optional<std::string> warning = end.WarnAfterCheck(kId, "mosaickv", 132, dense);
  ASSERT_TRUE(warning.has_value());
  EXPECT_THAT(*warning, HasSubstr("mosaickv has compressed nothing"));
  EXPECT_THAT(*warning, HasSubstr("layer 2, head 0: left dense: for a reason"));
  end.MarkEnded(0, 4, 300, 4, false);
  EXPECT_FALSE(end.IsCheckDue(1000));
  EXPECT_EQ(end.WarnAfterCheck(kId, "mosaickv", 300, dense), std::nullopt);
}

TEST(PromptEnd, SaysNothingWhereSomethingWas) {
  PromptEnd end;
  Outcomes outcomes = Of(v1::LANE_STATE_DENSE, v1::COMPRESSION_REASON_LOSS_ABOVE_LIMIT);
  *outcomes.Add() = Of(v1::LANE_STATE_COMPRESSED, v1::COMPRESSION_REASON_NONE).Get(0);
  EXPECT_EQ(end.WarnAfterCheck(kId, "mosaickv", 100, outcomes), std::nullopt);
  EXPECT_EQ(end.WarnAfterCheck(kId, "dense", 100,
                               Of(v1::LANE_STATE_DENSE, v1::COMPRESSION_REASON_POLICY_DENSE)),
            std::nullopt);
  EXPECT_EQ(end.WarnAfterCheck(kId, "mosaickv", 100, {}), std::nullopt) << "an older daemon";
  end.MarkEnded(0, 4, 100, 4, /*compressed=*/true);
  EXPECT_FALSE(end.IsCheckDue(1000)) << "Compress has told already";
}

}  // namespace
}  // namespace tessera::client
