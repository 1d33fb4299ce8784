// Parsing of Compress and Select requests: forms, rotations, rules.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "daemon/base/strings.h"
#include "daemon/serving/convert/convert.h"
#include "daemon/serving/convert/rotations.h"
#include "tests/fakes/rotations.h"
#include "tests/fakes/seed.h"

namespace tessera::serving {
namespace {

using kernels::ElementType;
using kernels::Summary;
using kernels::TileFormat;
using kernels::TileShape;
using testing::HasSubstr;

kernels::LayerGeometry Geometry(std::uint32_t head_dim, ElementType type = ElementType::kBf16) {
  return {.query_heads = 4, .kv_heads = 2, .head_dim = head_dim, .type = type};
}

TEST(Packing, WhatIsLeftOutHasItsDefault) {
  v1::Packing packing;
  packing.set_kept_channels(32);
  const TileShape plain = *ToTileShape(packing, Geometry(128), /*rotated=*/false);
  EXPECT_EQ(plain, (TileShape{.format = TileFormat::kPackedBf16,
                              .head_dim = 128,
                              .key = {128, 32},
                              .value = {128, 32},
                              .group = 1}));
  packing.set_summary(v1::BLOCK_SUMMARY_MEAN);
  const TileShape summed = *ToTileShape(packing, Geometry(128), false);
  EXPECT_EQ(summed.block, 8);
  EXPECT_EQ(kernels::TileAndSummaryBytes(kernels::LayoutOf(summed)), 32u * 170);
  v1::Packing quest;
  quest.set_dense(true);
  quest.set_summary(v1::BLOCK_SUMMARY_MIN_MAX);
  quest.set_block(16);
  const TileShape dense = *ToTileShape(quest, Geometry(64, ElementType::kFp32), false);
  EXPECT_EQ(dense.format, TileFormat::kDenseFp32);
  EXPECT_EQ(dense.summary, Summary::kMinMax);
  EXPECT_EQ(dense.block, 16);
}

// For arbitrary numbers: an accepted form is supported and equals the request, and every supported
// form is accepted.
TEST(Packing, ExactlyTheFormsThatAreServedAreAccepted) {
  TestRandom random;
  int accepted = 0;
  for (int round = 0; round < 200000; ++round) {
    const std::uint32_t head_dim = 64u << random.Below(3);
    v1::Packing packing;
    const auto number = [&](std::uint32_t most) {
      return static_cast<std::uint32_t>(random.OneIn(8) ? random.Border()
                                                        : random.Between(0, most));
    };
    packing.set_kept_channels(number(head_dim + 1));
    packing.set_channels(random.OneIn(2) ? 0 : number(head_dim + 1));
    packing.set_group(number(4));
    packing.set_values(static_cast<v1::ValueType>(random.Below(6)));
    packing.set_summary(static_cast<v1::BlockSummary>(random.Below(5)));
    packing.set_block(random.OneIn(2) ? 0 : number(17));
    const bool rotated = random.OneIn(2);
    const absl::StatusOr<TileShape> shape = ToTileShape(packing, Geometry(head_dim), rotated);

    const std::uint32_t group = packing.group() == 0 ? 1 : packing.group();
    const std::uint32_t channels = packing.channels() == 0 ? head_dim : packing.channels();
    const bool summed = packing.summary() != v1::BLOCK_SUMMARY_NONE;
    const std::uint32_t block = packing.block() == 0 && summed ? 8 : packing.block();
    const bool served =
        (group == 1 || group == 2 || group == 4) && channels <= head_dim && channels % group == 0 &&
        packing.kept_channels() >= 1 && packing.kept_channels() <= channels &&
        packing.kept_channels() % group == 0 && packing.values() <= 4 && packing.summary() <= 2 &&
        (summed ? block == 4 || block == 8 || block == 16 : block == 0) &&
        (rotated || channels == head_dim);
    ASSERT_EQ(shape.ok(), served) << packing.DebugString() << shape.status();
    if (!served) {
      ASSERT_EQ(shape.status().code(), absl::StatusCode::kInvalidArgument);
      continue;
    }
    ++accepted;
    ASSERT_EQ(kernels::UnsupportedReason(*shape), nullptr);
    ASSERT_EQ(shape->key.kept, packing.kept_channels());
    ASSERT_EQ(shape->key.channels, channels);
    ASSERT_EQ(shape->group, group);
    ASSERT_EQ(shape->block, block);
    ASSERT_EQ(static_cast<int>(shape->summary), packing.summary());
  }
  EXPECT_GT(accepted, 1000);
}

TEST(Packing, SignsNeedAPolicy) {
  v1::Packing packing;
  packing.set_kept_channels(16);
  packing.set_summary(v1::BLOCK_SUMMARY_SIGNS);
  const absl::StatusOr<TileShape> shape = ToTileShape(packing, Geometry(64), /*rotated=*/false);
  EXPECT_EQ(shape.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(shape.status().message().find("set a policy with signs"), std::string::npos)
      << shape.status();
}

TEST(Rotations, OrthonormalRowsPassInEveryTypeAndSize) {
  TestRandom random;
  for (const std::uint32_t head_dim : {64u, 128u, 256u}) {
    for (const ElementType type : {ElementType::kBf16, ElementType::kFp32}) {
      const auto channels = static_cast<std::uint32_t>(random.Between(1, head_dim));
      const std::vector<std::byte> matrix =
          fakes::RandomRotations(random, 1, channels, head_dim, type);
      const absl::Status status =
          CheckRotation(matrix.data(), type, channels, head_dim, {"R", 0, 0});
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

TEST(Rotations, OneElementThatIsOffIsNamed) {
  TestRandom random;
  constexpr std::uint32_t kDim = 64;
  for (int round = 0; round < 50; ++round) {
    std::vector<std::byte> matrix =
        fakes::RandomRotations(random, 1, kDim, kDim, ElementType::kFp32);
    const auto row = static_cast<std::uint32_t>(random.Below(kDim));
    const std::size_t at = (row * kDim + random.Below(kDim)) * sizeof(float);
    float value;
    std::memcpy(&value, matrix.data() + at, sizeof value);
    value += 0.01f;
    std::memcpy(matrix.data() + at, &value, sizeof value);
    const absl::Status status =
        CheckRotation(matrix.data(), ElementType::kFp32, kDim, kDim, {"rotations.key", 3, 1});
    ASSERT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    const std::string message(AsStringView(status.message()));
    EXPECT_THAT(message, HasSubstr("rotations.key of layer 3, kv head 1"));
    // The row itself, or one that is no longer orthogonal to it.
    EXPECT_THAT(message, HasSubstr(Concat("row ", row)));
    EXPECT_THAT(message, HasSubstr("limit for fp32 is 1e-04"));
  }
}

TEST(Rotations, TheBoundOfBf16HoldsForEveryRoundedRotation) {
  TestRandom random;
  for (int round = 0; round < 20; ++round) {
    const std::vector<std::byte> matrix =
        fakes::RandomRotations(random, 1, 128, 128, ElementType::kBf16);
    EXPECT_TRUE(CheckRotation(matrix.data(), ElementType::kBf16, 128, 128, {"R", 0, 0}).ok());
  }
  // A row of norm 1 + 2^-7 exceeds the bound; one of 1 + 2^-9 does not.
  std::vector<std::uint16_t> row(64);
  row[9] = kernels::FloatToBf16(1.0f + 0x1p-7f);
  const auto check = [&] {
    return CheckRotation(reinterpret_cast<const std::byte*>(row.data()), ElementType::kBf16, 1, 64,
                         {"R", 0, 0});
  };
  EXPECT_FALSE(check().ok());
  row[9] = kernels::FloatToBf16(1.0f);
  EXPECT_TRUE(check().ok());
}

TEST(Selections, RatesAndEntriesExcludeEachOther) {
  v1::Selection selection;
  EXPECT_FALSE(ToSelectionRule(selection).ok());
  selection.set_rate(0.25);
  EXPECT_EQ(ToSelectionRule(selection)->rate, 0.25);
  EXPECT_EQ(ToSelectionRule(selection)->entries, 0u);
  EXPECT_EQ(ToSelectionRule(selection)->floor, 0u);
  selection.set_floor(64);
  EXPECT_EQ(ToSelectionRule(selection)->floor, 64u);
  selection.set_entries(7);
  EXPECT_FALSE(ToSelectionRule(selection).ok());
  selection.set_rate(0);
  EXPECT_FALSE(ToSelectionRule(selection).ok());
  selection.set_floor(0);
  selection.set_judge(v1::Selection::JUDGE_LOGIT);
  selection.set_first_block(true);
  EXPECT_FALSE(ToSelectionRule(selection)->each_head);
  selection.set_each_head(true);
  const kernels::SelectionRule rule = *ToSelectionRule(selection);
  EXPECT_EQ(rule.entries, 7u);
  EXPECT_EQ(rule.judge, kernels::SelectionRule::Judge::kLogit);
  EXPECT_TRUE(rule.first_block);
  EXPECT_TRUE(rule.each_head);
}

}  // namespace
}  // namespace tessera::serving
