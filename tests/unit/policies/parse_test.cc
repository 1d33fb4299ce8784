// The grammar, and the positions in errors.
#include "daemon/policies/grammar/parse.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <string_view>

#include "daemon/base/strings.h"
#include "daemon/policies/registry.h"

namespace tessera::policies {
namespace {

using kernels::Summary;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

std::string ErrorOf(std::string_view text,
                    absl::StatusCode code = absl::StatusCode::kInvalidArgument) {
  const absl::StatusOr<Policy> policy = ParsePolicy(text);
  if (policy.ok()) return Concat("no error, but ", policy->text);
  EXPECT_EQ(policy.status().code(), code) << policy.status();
  return std::string(AsStringView(policy.status().message()));
}

Policy Parsed(std::string_view text) {
  const absl::StatusOr<Policy> policy = ParsePolicy(text);
  EXPECT_TRUE(policy.ok()) << policy.status();
  return policy.ok() ? *policy : Policy{};
}

TEST(Parse, NothingIsDense) {
  for (const char* text : {"", "  ", "\t\n", "dense", " dense "}) {
    const Policy policy = Parsed(text);
    EXPECT_TRUE(policy.dense());
    EXPECT_FALSE(policy.selection.has_value());
    EXPECT_EQ(policy.text, "dense");
  }
}

TEST(Parse, EveryOptionOfMosaicKvArrives) {
  const Policy policy = Parsed(
      "\n mosaickv: keep=50%|.25, group=2|1, loss_k=1%, loss_v=2%, truncate=.125, reorder=0, "
      "block=4|8, "
      "block_variance=.75, segment=32K, min_segment=64, sinks=5, recent=6, margin_k=.3, "
      "margin_v=.4, "
      "window=7, select=.2, floor=2K, judge=logit, first_block=0, rotation=fp32 + fp8 \t\n");
  ASSERT_TRUE(policy.mosaic.has_value() && policy.selection.has_value());
  EXPECT_FALSE(policy.dense());
  const kernels::StrategyOptions& strategy = policy.mosaic->strategy;
  EXPECT_THAT(strategy.kept, ElementsAre(0.25, 0.5));
  EXPECT_THAT(strategy.groups, ElementsAre(1u, 2u));
  EXPECT_EQ(strategy.threshold.key, 0.01);
  EXPECT_EQ(strategy.threshold.value, 0.02);
  EXPECT_EQ(strategy.truncated, 0.125);
  EXPECT_FALSE(strategy.reorder);
  EXPECT_EQ(strategy.summary, Summary::kMean);
  EXPECT_THAT(strategy.blocks, ElementsAre(4u, 8u));
  EXPECT_EQ(strategy.block_variance, 0.75);
  EXPECT_EQ(strategy.values, kernels::ValueType::kFp8);
  EXPECT_EQ(strategy.rotation_type, kernels::ElementType::kFp32);
  const SegmentOptions& segments = policy.mosaic->segments;
  EXPECT_EQ(segments.tokens, 32768u);
  EXPECT_EQ(segments.min_tokens, 64u);
  EXPECT_EQ(segments.sinks, 5u);
  EXPECT_EQ(segments.recent, 6u);
  EXPECT_EQ(segments.loss_window, 7u);
  EXPECT_EQ(segments.margin.key, 0.3);
  EXPECT_EQ(segments.margin.value, 0.4);
  EXPECT_EQ(policy.selection->rule.rate, 0.2);
  EXPECT_EQ(policy.selection->rule.entries, 0u);
  EXPECT_EQ(policy.selection->rule.floor, 2048u);
  EXPECT_EQ(policy.selection->rule.judge, kernels::SelectionRule::Judge::kLogit);
  EXPECT_FALSE(policy.selection->rule.first_block);
  EXPECT_EQ(policy.selection->dense_layers, 0u);
}

TEST(Parse, ValueTypesArrive) {
  using kernels::ValueType;
  const auto values = [](std::string_view type) {
    return Parsed(Concat("mosaickv+", type)).mosaic->strategy.values;
  };
  EXPECT_EQ(values("bf16"), ValueType::kBf16);
  EXPECT_EQ(values("fp16"), ValueType::kFp16);
  EXPECT_EQ(values("int8"), ValueType::kInt8);
  EXPECT_EQ(values("fp8"), ValueType::kFp8);
}

TEST(Parse, SelectionAloneArrives) {
  const SelectionPolicy by_rate =
      *Parsed("select:rate=5%,floor=64,judge=logit,heads=each,dense_layers=3").selection;
  EXPECT_EQ(by_rate.rule.rate, 0.05);
  EXPECT_EQ(by_rate.rule.entries, 0u);
  EXPECT_EQ(by_rate.rule.floor, 64u);
  EXPECT_EQ(by_rate.rule.judge, kernels::SelectionRule::Judge::kLogit);
  EXPECT_TRUE(by_rate.rule.first_block);
  EXPECT_TRUE(by_rate.rule.each_head);
  EXPECT_EQ(by_rate.dense_layers, 3u);
  const Policy by_entries = Parsed("select:entries=1M,first_block=0");
  EXPECT_TRUE(by_entries.dense());
  EXPECT_EQ(by_entries.selection->rule.entries, 1048576u);
  EXPECT_EQ(by_entries.selection->rule.rate, 1);
  EXPECT_EQ(by_entries.selection->rule.floor, 0u);
  EXPECT_FALSE(by_entries.selection->rule.first_block);
  EXPECT_FALSE(by_entries.selection->rule.each_head);
  EXPECT_EQ(by_entries.selection->dense_layers, 0u);
}

TEST(Parse, EveryOptionOfTokenPoliciesArrives) {
  EXPECT_EQ(
      Parsed("chunkkv:mode=kvpress,chunk=7,window=9,budget=30%,scope=head,agg=sum,reuse=2").tokens,
      TokenPolicy(ChunkKvPolicy{.kvpress = true,
                                .chunk = 7,
                                .window = 9,
                                .budget = {.share = 0.3},
                                .scope = Scope::kHead,
                                .reuse = 2}));
  EXPECT_EQ(Parsed("chunkkv:mode=kvpress").tokens,
            TokenPolicy(ChunkKvPolicy{.kvpress = true, .chunk = 20, .window = 64, .mean = true}));
  EXPECT_EQ(Parsed("chunkkv:tokens=64,score=logit,agg=mean").tokens,
            TokenPolicy(ChunkKvPolicy{.budget = {.tokens = 64}, .mean = true, .logit = true}));
  EXPECT_EQ(Parsed("semantickv:lambda=.5,recent_ratio=.25,sink=3,keep_middle=.125,mask=none,"
                   "agg=max")
                .tokens,
            TokenPolicy(SemanticKvPolicy{.lambda = 0.5,
                                         .recent_ratio = 0.25,
                                         .sink = 3,
                                         .keep_middle = 0.125,
                                         .causal = false,
                                         .aggregate = SemanticKvPolicy::Aggregate::kMax}));
  EXPECT_EQ(Parsed("semantickv:norm=visible").tokens,
            TokenPolicy(SemanticKvPolicy{.keep_total = 0.2, .norm_visible = true}));
  EXPECT_EQ(Parsed("semanticache:budget=.5,scope=layer,delimiters=0,max_chunk=9,sink=1,recent=2,"
                   "leave_open=1,key_space=pre")
                .merging,
            TokenPolicy(SemantiCachePolicy{.budget = 0.5,
                                           .scope = Scope::kLayer,
                                           .delimiters = false,
                                           .max_chunk = 9,
                                           .sink = 1,
                                           .recent = 2,
                                           .leave_open = true,
                                           .key_space = KeySpace::kPre}));
  EXPECT_EQ(
      Parsed("lacache:budget=1K,span=8,overlap=4,sink=2,map=band,pass=uniform").tokens,
      TokenPolicy(LaCachePolicy{
          .budget = 1024, .span = 8, .overlap = 4, .sink = 2, .band = true, .uniform = true}));
  EXPECT_EQ(Parsed("snapkv:tokens=99,window=7,kernel=3,pool=max").tokens,
            TokenPolicy(
                SnapKvPolicy{.budget = {.tokens = 99},
                             .scoring = {.window = 7, .kernel = 3, .pooling = Pooling::kLargest}}));
  EXPECT_EQ(std::get<PyramidKvPolicy>(*Parsed("pyramidkv:beta=3").tokens).beta, 3);
  EXPECT_EQ(std::get<StreamingPolicy>(*Parsed("streaming:budget=10").tokens).newest(), 6u);
}

// What the papers say, where the defaults are others.
TEST(Parse, ThePapersSettingsOfMosaicKv) {
  const Policy paper = Parsed("mosaickv:truncate=0.25,block=4|8|16,sinks=0,recent=0,floor=0+bf16");
  EXPECT_EQ(paper.text, "mosaickv:truncate=0.25,block=4|8|16,sinks=0,recent=0,floor=0+bf16");
  EXPECT_THAT(paper.mosaic->strategy.blocks, ElementsAre(4u, 8u, 16u));
  EXPECT_EQ(paper.mosaic->strategy.values, kernels::ValueType::kBf16);
  EXPECT_EQ(paper.mosaic->segments.sinks, 0u);
  EXPECT_EQ(paper.mosaic->segments.recent, 0u);
  EXPECT_EQ(paper.selection->rule, (kernels::SelectionRule{.rate = 0.1, .first_block = true}));
}

TEST(Parse, CanonicalText) {
  const auto text = [](std::string_view spelt) { return Parsed(spelt).text; };
  EXPECT_EQ(text("fp8 + mosaickv : rotation=fp32 , keep=50% | 12.5%"),
            "mosaickv:keep=0.125|0.5,rotation=fp32+fp8");
  EXPECT_EQ(text("mosaickv:keep=0.125|25%|0.375+int8"), "mosaickv");
  EXPECT_EQ(text("bf16+mosaickv"), "mosaickv+bf16");
  EXPECT_EQ(text("mosaickv+select:floor=64"), "mosaickv:floor=64");
  EXPECT_EQ(text("mosaickv:loss_k=33.3%"), "mosaickv:loss_k=0.333");
  EXPECT_EQ(text("mosaickv:segment=32768,min_segment=8K"), "mosaickv:segment=32K,min_segment=8192");
  EXPECT_EQ(text("quest:tokens=2M"), "quest:tokens=2M");
}

TEST(Parse, WordsThatAreNotKnown) {
  EXPECT_THAT(ErrorOf("mosaickv+ Mosaickw"),
              AllOf(StartsWith("policy, character 11: \"Mosaickw\" is not one of "),
                    HasSubstr(TermNames()), HasSubstr("did you mean \"mosaickv\"?")));
  EXPECT_THAT(ErrorOf("ques"), HasSubstr("did you mean \"quest\"?"));
  EXPECT_THAT(ErrorOf("QUEST"), HasSubstr("did you mean \"quest\"?"));
  EXPECT_THAT(ErrorOf("nothing-like-it"),
              AllOf(HasSubstr("is not one of"), Not(HasSubstr("did you mean"))));
  EXPECT_THAT(ErrorOf("quest: pgae=8"),
              AllOf(StartsWith("policy, character 8: quest: \"pgae\" is not one of its options, "
                               "page, tokens, heads, dense_layers"),
                    HasSubstr("did you mean \"page\"?")));
  EXPECT_THAT(ErrorOf("mosaickv:rotation=bf61"), HasSubstr("did you mean \"bf16\"?"));
  EXPECT_THAT(ErrorOf(std::string(500, 'q')),
              AllOf(HasSubstr("(500 bytes)"), Not(HasSubstr(std::string(201, 'q')))));
}

TEST(Parse, WhatIsMissingIsNamedWithItsPlace) {
  EXPECT_EQ(ErrorOf("quest+"), "policy, character 7: a term is missing");
  EXPECT_EQ(ErrorOf("+quest"), "policy, character 1: a term is missing");
  EXPECT_EQ(ErrorOf("quest++int8"), "policy, character 7: a term is missing");
  EXPECT_EQ(ErrorOf("quest:"), "policy, character 7: quest: an option is missing; write key=value");
  EXPECT_EQ(ErrorOf("quest:page=8,"),
            "policy, character 14: quest: an option is missing; write key=value");
  EXPECT_EQ(ErrorOf("quest:=8"),
            "policy, character 7: quest: an option is missing; write key=value");
  EXPECT_EQ(ErrorOf("quest:page"),
            "policy, character 7: quest: page has no value; write page=VALUE");
  EXPECT_EQ(ErrorOf("quest:page="), "policy, character 12: quest: page: \"\" is not 4, 8 or 16");
  EXPECT_EQ(ErrorOf("streaming:sink="),
            "policy, character 16: streaming: sink: \"\" is not a whole number, such as 4096 or "
            "64K");
  EXPECT_EQ(ErrorOf("dense:x=1"), "policy, character 7: dense has no options");
}

TEST(Parse, OptionsAndTermsAreThereOnce) {
  EXPECT_EQ(ErrorOf("quest:page=8, page=8"), "policy, character 15: quest: page is given twice");
  EXPECT_EQ(ErrorOf("quest + quest"), "policy, character 9: quest is given twice");
}

TEST(Parse, LengthAndCharactersAreLimited) {
  EXPECT_EQ(Parsed(std::string(kMaxPolicyText, ' ')).text, "dense");
  EXPECT_EQ(ErrorOf(std::string(kMaxPolicyText + 1, ' ')),
            "policy: the text has 1025 characters; the limit is 1024");
  EXPECT_EQ(ErrorOf("  quest\t+int8\n"), "policy, character 8: byte 9 is not printable ASCII");
  EXPECT_EQ(ErrorOf("quest\x01"), "policy, character 6: byte 1 is not printable ASCII");
  EXPECT_EQ(ErrorOf("\xc3\xa9"), "policy, character 1: byte 195 is not printable ASCII");
  EXPECT_EQ(ErrorOf(std::string_view("quest\0", 6)),
            "policy, character 6: byte 0 is not printable ASCII");
}

}  // namespace
}  // namespace tessera::policies
