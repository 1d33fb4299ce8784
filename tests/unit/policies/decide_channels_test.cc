// ThinK's choice of key channels, compared with its definition.
#include <algorithm>
#include <numeric>

#include "daemon/base/strings.h"
#include "daemon/policies/channels/key_channels.h"
#include "daemon/policies/plan.h"
#include "tests/unit/policies/decide.h"

namespace tessera::policies {
namespace {

using testing::HasSubstr;

constexpr kernels::ElementType kTypes[] = {kernels::ElementType::kBf16, kernels::ElementType::kFp16,
                                           kernels::ElementType::kFp32};

// mean_t q_d^2 over the newest queries, averaged over the group, times mean_t k_d^2 over all keys.
std::vector<double> ReferenceScores(ObservedLayer& layer, std::size_t lane, std::uint64_t window) {
  const std::uint64_t queries = std::min(window, layer.tokens());
  std::vector<double> scores;
  for (std::uint32_t d = 0; d < layer.options().head_dim; ++d) {
    double of_queries = 0;
    for (std::uint32_t i = 0; i < layer.group(); ++i) {
      const auto& head = layer.queries()[lane * layer.group() + i];
      double squares = 0;
      for (std::uint64_t t = layer.tokens() - queries; t < layer.tokens(); ++t) {
        squares += double{head[t][d]} * head[t][d];
      }
      of_queries += squares / static_cast<double>(queries) / layer.group();
    }
    double of_keys = 0;
    for (const ObservedLayer::Entry& entry : layer.lanes()[lane]) {
      of_keys += double{entry.key[d]} * entry.key[d];
    }
    scores.push_back(of_queries * of_keys / static_cast<double>(layer.lanes()[lane].size()));
  }
  return scores;
}

TEST(KeyChannels, AreTheBestByTheirDefinition) {
  TestRandom random;
  for (int round = 0; round < 40; ++round) {
    const std::uint32_t head_dim = random.Pick(kernels::kHeadDims);
    const std::uint64_t window = random.Between(1, 40);
    const double ratio = static_cast<double>(random.Between(5, 95)) / 100;
    const Policy policy = Parsed(Concat("think:ratio=", ratio, ",window=", window));
    ObservedLayer layer({.query_heads = static_cast<std::uint32_t>(2 * random.Between(1, 3)),
                         .head_dim = head_dim,
                         .type = random.Pick(kTypes)},
                        ExactOperations(), random);
    layer.Grow(random.Between(1, 90));
    const auto decision = DecideKeyChannels(policy, layer.Show(NeedsOf(policy), layer.tokens()));
    ASSERT_TRUE(decision.ok()) << decision.status();
    ASSERT_EQ(decision->size(), layer.lanes().size());
    const auto dropped = static_cast<std::uint32_t>(ratio * head_dim);
    for (std::size_t lane = 0; lane < decision->size(); ++lane) {
      const std::vector<std::uint32_t>& kept = (*decision)[lane];
      ASSERT_EQ(kept.size(), head_dim - dropped);
      ASSERT_TRUE(std::ranges::is_sorted(kept, std::less_equal<>()));
      const std::vector<double> scores = ReferenceScores(layer, lane, window);
      double weakest = std::numeric_limits<double>::infinity();
      double strongest_gone = 0;
      for (std::uint32_t d = 0; d < head_dim; ++d) {
        const bool stays = std::ranges::binary_search(kept, d);
        if (stays) weakest = std::min(weakest, scores[d]);
        if (!stays) strongest_gone = std::max(strongest_gone, scores[d]);
      }
      ASSERT_GE(weakest * (1 + 1e-12), strongest_gone);
    }
  }
}

TEST(KeyChannels, OfEqualOnesTheLowerStay) {
  TestRandom random;
  const Policy policy = Parsed("think:ratio=0.25");
  ObservedLayer layer({}, ExactOperations(), random);
  layer.Grow(40);
  for (auto& lane : layer.lanes()) {
    for (ObservedLayer::Entry& entry : lane) std::ranges::fill(entry.key, 0.0f);
  }
  const auto decision = DecideKeyChannels(policy, layer.Show(NeedsOf(policy), layer.tokens()));
  ASSERT_TRUE(decision.ok()) << decision.status();
  Indices32 lowest(48);
  std::iota(lowest.begin(), lowest.end(), 0u);
  for (const std::vector<std::uint32_t>& kept : *decision) EXPECT_EQ(kept, lowest);
}

TEST(KeyChannels, WhatWasNotShownIsMissing) {
  TestRandom random;
  const Policy policy = Parsed("think");
  ObservedLayer layer({}, ExactOperations(), random);
  layer.Grow(60);
  const auto nothing = DecideKeyChannels(policy, layer.Show({}, layer.tokens()));
  EXPECT_EQ(nothing.status().code(), absl::StatusCode::kFailedPrecondition);
  const auto few = DecideKeyChannels(policy, layer.Show({.last_queries = 31}, layer.tokens()));
  EXPECT_EQ(few.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(AsStringView(few.status().message())), HasSubstr("1 of the newest 32"));
}

TEST(KeyChannels, TheirFormHasNoBitmapsAndWholeValues) {
  const auto shape_of = [](const char* text, std::uint32_t head_dim, kernels::ElementType type) {
    return KeyChannelShape(*Parsed(text).key_channels, {.head_dim = head_dim, .type = type});
  };
  const kernels::TileShape shape = shape_of("think", 128, kernels::ElementType::kBf16);
  EXPECT_EQ(shape.format, kernels::TileFormat::kPackedBf16);
  EXPECT_EQ(shape.key, (kernels::RowShape{77, 77}));
  EXPECT_EQ(shape.value, (kernels::RowShape{128, 128}));
  EXPECT_EQ(kernels::LayoutOf(shape).bytes, 32u * 410);
  EXPECT_EQ(shape_of("think", 64, kernels::ElementType::kFp16).format,
            kernels::TileFormat::kPackedFp16);
  EXPECT_EQ(shape_of("think+int8", 256, kernels::ElementType::kFp32).format,
            kernels::TileFormat::kPackedInt8);
  EXPECT_EQ(shape_of("think:ratio=0.99609375", 256, kernels::ElementType::kBf16).key.kept, 1);
}

}  // namespace
}  // namespace tessera::policies
