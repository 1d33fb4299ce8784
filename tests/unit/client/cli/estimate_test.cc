// What `tessera explain` computes. e2e_explain_test compares it with a daemon.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "client/cli/policies/policy_estimate.h"
#include "daemon/policies/grammar/parse.h"

namespace tessera::cli {
namespace {

using testing::Contains;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

PolicyEstimate EstimateOf(const std::string& text, std::uint64_t tokens,
                          const ModelShape& model = {}) {
  const auto policy = policies::ParsePolicy(text);
  EXPECT_TRUE(policy.ok()) << policy.status();
  auto estimate = EstimatePolicy(policy.value_or(policies::Policy{}), model, tokens);
  EXPECT_TRUE(estimate.ok()) << estimate.status();
  return estimate.value_or(PolicyEstimate{});
}

// 32 layers of 8 kv heads with 128 channels of K and V in bf16.
constexpr std::uint64_t kDensePerToken = 32 * 8 * 128 * 2 * 2;

TEST(EstimateTest, DenseIsWhatItSays) {
  const PolicyEstimate estimate = EstimateOf("dense", 4096);
  EXPECT_EQ(estimate.dense_bytes, 4096 * kDensePerToken);
  EXPECT_EQ(estimate.bytes.least, estimate.dense_bytes);
  EXPECT_EQ(estimate.bytes.most, estimate.dense_bytes);
  EXPECT_EQ(estimate.kept.least, 4096u);
  EXPECT_THAT(estimate.obstacles, IsEmpty());
}

TEST(EstimateTest, ABudgetOfTokensIsExact) {
  const PolicyEstimate estimate = EstimateOf("snapkv:budget=0.25", 4096);
  EXPECT_EQ(estimate.kept.least, 1024u);
  EXPECT_EQ(estimate.kept.most, 1024u);
  // Four bytes per entry say where it was.
  EXPECT_EQ(estimate.bytes.most, 1024 * (kDensePerToken + 32 * 8 * 4));
  EXPECT_EQ(estimate.bytes.least, estimate.bytes.most);
  EXPECT_THAT(estimate.needs, HasSubstr("quer"));
  EXPECT_THAT(estimate.obstacles, Contains(HasSubstr("until the worker has sent")));
}

TEST(EstimateTest, APromptBelowMinSegmentIsNamed) {
  const PolicyEstimate estimate = EstimateOf("mosaickv:keep=0.25,recent=0,sinks=0", 4000);
  EXPECT_EQ(estimate.bytes.most, estimate.dense_bytes);
  EXPECT_LT(estimate.bytes.least, estimate.dense_bytes / 2);
  EXPECT_THAT(estimate.obstacles, Contains(HasSubstr("shorter than min_segment 4096")));
  const PolicyEstimate longer = EstimateOf("mosaickv:keep=0.25,recent=0,sinks=0", 4096);
  EXPECT_LT(longer.bytes.most, longer.dense_bytes / 2);
  EXPECT_THAT(longer.obstacles, Not(Contains(HasSubstr("min_segment"))));
}

TEST(EstimateTest, ASegmentThatIsTooShortForItsRotationsIsNamed) {
  const PolicyEstimate estimate =
      EstimateOf("mosaickv:keep=0.25,recent=0,sinks=0,min_segment=128", 64);
  EXPECT_EQ(estimate.bytes.least, estimate.dense_bytes);
  EXPECT_THAT(estimate.obstacles, Contains(HasSubstr("larger than dense rows, and stays dense")));
  EXPECT_THAT(EstimateOf("mosaickv:keep=0.25,recent=0,sinks=0,min_segment=32", 64).obstacles,
              Contains(HasSubstr("is larger than dense rows; raise min_segment")));
}

TEST(EstimateTest, APromptThatIsTooShortForTheBudgetWaits) {
  const PolicyEstimate estimate = EstimateOf("chunkkv:budget=0.1", 100);
  EXPECT_EQ(estimate.kept.least, 100u);
  EXPECT_THAT(estimate.obstacles, Contains(HasSubstr("less than window 32")));
  EXPECT_THAT(EstimateOf("streaming:sink=4,recent=508", 300).obstacles,
              Contains(HasSubstr("up to 512 tokens are kept whole")));
}

TEST(EstimateTest, ASelectionSaysWhatItReads) {
  EXPECT_EQ(EstimateOf("quest:tokens=1024", 8192).read, 1024u);
  EXPECT_EQ(EstimateOf("quest:tokens=1024", 512).read, 0u);
}

TEST(EstimateTest, WhatTheModelCannotHaveIsRefused) {
  const auto semantic = policies::ParsePolicy("semanticache");
  ASSERT_TRUE(semantic.ok());
  EXPECT_TRUE(absl::IsInvalidArgument(EstimatePolicy(*semantic, {}, 4096).status()));
  EXPECT_TRUE(EstimatePolicy(*semantic, {.delimiters = true}, 4096).ok());
  ModelShape odd;
  odd.geometry.head_dim = 80;
  EXPECT_THAT(EstimatePolicy(*semantic, odd, 4096).status().ToString(), HasSubstr("head_dim 80"));
}

}  // namespace
}  // namespace tessera::cli
