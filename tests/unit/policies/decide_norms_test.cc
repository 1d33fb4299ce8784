// Which queries judge by norm: the known ones among the tokens that the policy considers.
#include <algorithm>

#include "daemon/base/strings.h"
#include "tests/unit/policies/decide.h"

namespace tessera::policies {
namespace {

using testing::HasSubstr;

// Of some tokens only the queries from other workers are known.
TEST(DecideNorms, WeakerQueriesDoNotStandInForStrongOnes) {
  TestRandom random;
  ObservedLayer layer({}, ExactOperations(), random);
  layer.Grow(100);
  const auto decided = [&](const char* options, std::uint64_t norms_known) {
    const Policy policy = Parsed(Concat("semantickv:lambda=0.05,recent_ratio=0.2,", options));
    LayerView view = layer.Show(NeedsOf(policy), layer.tokens());
    view.norms_known = norms_known;
    LayerMemory memory;
    return Decide(policy, view, memory).status().ToString();
  };
  EXPECT_EQ(decided("sink=4", 5), "OK");
  EXPECT_THAT(decided("sink=4", 3), HasSubstr("of 100 tokens, the 5 queries of largest norm are "));
  EXPECT_THAT(decided("sink=4", 3), HasSubstr("for a length of 60 tokens, which needs only 3;"));
  EXPECT_EQ(decided("sink=90", 3), "OK");  // keeps everything
}

// Queries before the prompt do not judge by norm, and the required number is a share of the
// prompt's.
TEST(DecideNorms, OnlyThoseOfThePromptAreCompared) {
  TestRandom random;
  ObservedLayer layer({}, ExactOperations(), random);
  layer.Grow(100);
  const Policy policy = Parsed("semantickv:lambda=0.1,recent_ratio=0.01,sink=4,keep_total=0.2");
  const auto decided = [&](std::uint64_t norms_first, std::uint64_t norms_known, bool strip) {
    Needs needs = NeedsOf(policy);
    needs.norm_share = 1;
    LayerView view = layer.Show(needs, layer.tokens());
    std::vector<HeadQueries> queries(view.queries.begin(), view.queries.end());
    const std::size_t row_bytes =
        view.geometry.head_dim * kernels::ElementBytes(view.geometry.type);
    for (HeadQueries& head : queries) {
      if (!strip) continue;
      const auto skipped = static_cast<std::size_t>(
          std::ranges::lower_bound(head.positions, norms_first) - head.positions.begin());
      head.positions = head.positions.subspan(skipped);
      head.rows += skipped * row_bytes;
    }
    view.queries = queries;
    view.norms_first = norms_first;
    view.norms_known = norms_known;
    LayerMemory memory;
    return Decide(policy, view, memory);
  };
  const auto kept = [](const absl::StatusOr<LayerDecision>& decision) {
    std::vector<std::vector<std::uint32_t>> lanes;
    for (const LaneDecision& lane : *decision) lanes.push_back(lane.kept);
    return lanes;
  };
  const auto all_there = decided(60, 4, /*strip=*/false);
  ASSERT_TRUE(all_there.ok()) << all_there.status();
  const auto alone = decided(60, 4, /*strip=*/true);
  ASSERT_TRUE(alone.ok()) << alone.status();
  EXPECT_EQ(kept(all_there), kept(alone));
  EXPECT_THAT(decided(60, 3, false).status().ToString(),
              HasSubstr("of 40 tokens, the 4 queries of largest norm are needed"));
  LayerView view = layer.Show(NeedsOf(policy), layer.tokens());
  view.norms_first = 60;
  view.norms_observed_end = 90;
  LayerMemory memory;
  EXPECT_THAT(Decide(policy, view, memory).status().ToString(),
              HasSubstr("largest norm of the tokens from 90 on have not been observed"));
}

}  // namespace
}  // namespace tessera::policies
