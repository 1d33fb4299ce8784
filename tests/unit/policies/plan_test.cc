// The settings of a policy for each layer.
#include "daemon/policies/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "daemon/base/strings.h"
#include "daemon/policies/grammar/parse.h"
#include "daemon/policies/grammar/validate.h"
#include "tests/fakes/seed.h"

namespace tessera::policies {
namespace {

using kernels::ElementType;
using kernels::LayerGeometry;
using kernels::Summary;
using testing::HasSubstr;

LayerGeometry Geometry(std::uint32_t head_dim, ElementType type = ElementType::kBf16) {
  return {.query_heads = 4, .kv_heads = 2, .head_dim = head_dim, .type = type};
}

TEST(Plan, DenseLayersReadEverything) {
  const Policy quest = *ParsePolicy("quest:dense_layers=3");
  for (std::uint32_t layer = 0; layer < 6; ++layer) {
    EXPECT_EQ(SelectionOf(quest, layer).has_value(), layer >= 3) << layer;
  }
  EXPECT_TRUE(SelectionOf(*ParsePolicy("mosaickv"), 0).has_value());
  EXPECT_FALSE(SelectionOf(*ParsePolicy("mosaickv:select=0"), 9).has_value());
  EXPECT_FALSE(SelectionOf(*ParsePolicy("dense"), 9).has_value());
}

// max(3, tokens / page) pages for any numbers.
TEST(Plan, QuestsBudgetIsWholePagesAndAtLeastThree) {
  TestRandom random;
  for (int round = 0; round < 1000; ++round) {
    const std::uint64_t page = 4u << random.Below(3);
    const std::uint64_t tokens = random.Between(1, random.OneIn(2) ? 100 : 100000);
    const auto policy = ParsePolicy(Concat("quest:page=", page, ",tokens=", tokens));
    ASSERT_TRUE(policy.ok()) << policy.status();
    const std::uint64_t entries = SelectionOf(*policy, 2)->entries;
    EXPECT_EQ(entries % page, 0u);
    EXPECT_GE(entries, 3 * page);
    EXPECT_TRUE(entries == 3 * page || (entries <= tokens && entries + page > tokens))
        << tokens << " tokens in pages of " << page << ": " << entries;
  }
}

TEST(Plan, SummaryShape) {
  const kernels::TileShape shape =
      SummaryShape(*ParsePolicy("quest:page=8"), Geometry(64, ElementType::kFp16));
  kernels::TileShape expected = kernels::DenseShape(64, ElementType::kFp16);
  expected.summary = Summary::kMinMax;
  expected.block = 8;
  EXPECT_EQ(shape, expected);
  EXPECT_EQ(kernels::UnsupportedReason(shape), nullptr);
  // Quest's metadata in a bf16 layer: 2 rows of keys per 16 tokens.
  const auto bytes = [](const char* policy) {
    return kernels::TileAndSummaryBytes(
        kernels::LayoutOf(SummaryShape(*ParsePolicy(policy), Geometry(128))));
  };
  EXPECT_EQ(bytes("quest"), 32u * 544);
  EXPECT_EQ(bytes("dense"), 32u * 512);
  // With mosaickv the summaries cover packed rows.
  EXPECT_EQ(bytes("mosaickv+quest"), 32u * 512);
}

TEST(Plan, CheckForNamesWhatDoesNotFit) {
  const auto check = [](const char* text, std::uint32_t head_dim) {
    return CheckFor(*ParsePolicy(text), Geometry(head_dim));
  };
  const Policy small = *ParsePolicy("mosaickv:keep=2%,group=1|2|4");
  EXPECT_TRUE(CheckFor(small, Geometry(256)).ok());
  const absl::Status status = CheckFor(small, Geometry(128));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(std::string(AsStringView(status.message())),
            "policy: mosaickv: keep 0.02 of head_dim 128 is 2 channels, less than a group of 4");
  EXPECT_TRUE(check("mosaickv:keep=2%,group=1|2", 128).ok());
  EXPECT_FALSE(check("mosaickv:keep=2%,group=1|2", 64).ok());
  EXPECT_TRUE(check("mosaickv:truncate=.9,keep=.1", 64).ok());
  EXPECT_THAT(
      std::string(AsStringView(check("mosaickv:truncate=.95,keep=.03,group=1", 64).message())),
      HasSubstr("truncate 0.95 leaves less than 4 channels of head_dim 64"));
  for (const char* policy : {"dense", "quest", "mosaickv", "mosaickv+quest", "select"}) {
    EXPECT_FALSE(check(policy, 80).ok()) << policy;
    for (const std::uint32_t head_dim : {64u, 128u, 256u}) {
      EXPECT_TRUE(check(policy, head_dim).ok()) << policy;
    }
  }
}

// Every candidate of an accepted policy is a supported shape, rounded as strategies round.
TEST(Plan, WhatFitsIsServed) {
  TestRandom random;
  int fitting = 0;
  for (int round = 0; round < 20000; ++round) {
    const std::uint32_t head_dim = 64u << random.Below(3);
    Policy policy = *ParsePolicy("mosaickv");
    kernels::StrategyOptions& strategy = policy.mosaic->strategy;
    strategy.kept = {static_cast<double>(random.Between(1, 400)) / 400 /
                     (random.OneIn(2) ? 32 : 1)};
    strategy.groups = {1u << random.Below(3)};
    strategy.truncated = random.OneIn(2) ? 0 : static_cast<double>(random.Below(1000)) / 1000;
    if (!Validate(policy).ok() || !CheckFor(policy, Geometry(head_dim)).ok()) continue;
    ++fitting;
    const auto down = [](double count) {
      return static_cast<std::uint32_t>(std::floor(count + 1e-6));
    };
    const std::uint32_t group = strategy.groups[0];
    const std::uint32_t channels = down(head_dim * (1 - strategy.truncated)) / 4 * 4;
    const std::uint32_t kept =
        std::min(down(strategy.kept[0] * head_dim), channels) / group * group;
    const kernels::RowShape row = {static_cast<std::uint16_t>(channels),
                                   static_cast<std::uint16_t>(kept)};
    const kernels::TileShape shape = {.format = kernels::TileFormat::kPackedBf16,
                                      .head_dim = static_cast<std::uint16_t>(head_dim),
                                      .key = row,
                                      .value = row,
                                      .group = static_cast<std::uint8_t>(group)};
    ASSERT_EQ(kernels::UnsupportedReason(shape), nullptr)
        << kernels::UnsupportedReason(shape) << ": keep " << strategy.kept[0] << ", group " << group
        << ", truncate " << strategy.truncated << ", head_dim " << head_dim;
  }
  EXPECT_GT(fitting, 2000);  // makes sure that enough are accepted
}

}  // namespace
}  // namespace tessera::policies
