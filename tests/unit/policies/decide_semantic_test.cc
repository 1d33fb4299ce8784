// SemanticKV, compared with its definition.
#include <cmath>
#include <numeric>
#include <set>

#include "daemon/base/strings.h"
#include "tests/unit/policies/decide.h"

namespace tessera::policies {
namespace {

double SquaredNorm(const ObservedLayer::Row& row) {
  double sum = 0;
  for (const float number : row) sum += double{number} * number;
  return sum;
}

struct Semantic {
  double lambda = 0.01;
  double recent_ratio = 0.01;
  std::uint64_t sink = 256;
  double keep_total = 0.2;
  bool causal = true;
  bool visible = false;
  std::string agg = "mean";
};

// The positions of the judging queries.
std::set<std::uint64_t> ReferenceObservers(ObservedLayer& layer, std::uint32_t head,
                                           const Semantic& semantic, std::uint64_t recent) {
  const std::uint64_t tokens = layer.tokens();
  std::vector<double> lengths;
  for (const ObservedLayer::Row& row : layer.queries()[head]) lengths.push_back(SquaredNorm(row));
  const auto count =
      static_cast<std::size_t>(std::ceil(semantic.lambda * static_cast<double>(tokens) - 1e-6));
  std::set<std::uint64_t> observers;
  for (const std::uint32_t i : ReferenceTop(lengths, count)) observers.insert(i);
  for (std::uint64_t i = tokens - recent; i < tokens; ++i) observers.insert(i);
  return observers;
}

std::vector<double> ReferenceScores(ObservedLayer& layer, std::size_t lane,
                                    const Semantic& semantic, std::uint64_t recent) {
  std::vector<double> scores(layer.tokens());
  const std::uint32_t group = layer.group();
  for (std::uint32_t i = 0; i < group; ++i) {
    const std::uint32_t head = static_cast<std::uint32_t>(lane) * group + i;
    const std::set<std::uint64_t> observers = ReferenceObservers(layer, head, semantic, recent);
    std::vector<double> paid(layer.tokens());
    for (const std::uint64_t observer : observers) {
      const auto shares = layer.Shares(head, observer, layer.AllOf(lane), semantic.causal);
      for (std::size_t t = 0; t < paid.size(); ++t) paid[t] += shares[t];
    }
    for (std::size_t t = 0; t < paid.size(); ++t) {
      const auto after =
          std::ranges::count_if(observers, [t](std::uint64_t position) { return position >= t; });
      paid[t] /=
          semantic.visible ? static_cast<double>(after) : static_cast<double>(observers.size());
      if (semantic.agg == "max") {
        scores[t] = std::max(scores[t], paid[t]);
      } else {
        scores[t] += semantic.agg == "sum" ? paid[t] : paid[t] / group;
      }
    }
  }
  return scores;
}

Indices32 PlainSemantic(ObservedLayer& layer, std::size_t lane, const Semantic& semantic) {
  const double n = static_cast<double>(layer.tokens());
  const std::uint64_t recent = std::max<std::uint64_t>(
      1, static_cast<std::uint64_t>(std::ceil(semantic.recent_ratio * n - 1e-6)));
  const auto total = static_cast<std::int64_t>(std::floor(semantic.keep_total * n + 1e-6));
  const std::int64_t middle =
      std::max<std::int64_t>(0, total - static_cast<std::int64_t>(semantic.sink + recent));
  if (semantic.sink + recent + static_cast<std::uint64_t>(middle) >= layer.tokens()) {
    return layer.AllOf(lane);
  }
  const std::vector<double> scores = ReferenceScores(layer, lane, semantic, recent);
  const std::vector<double> between(scores.begin() + static_cast<std::ptrdiff_t>(semantic.sink),
                                    scores.end() - static_cast<std::ptrdiff_t>(recent));
  Indices32 kept(semantic.sink);
  std::iota(kept.begin(), kept.end(), 0u);
  for (const std::uint32_t i : ReferenceTop(between, static_cast<std::size_t>(middle))) {
    kept.push_back(static_cast<std::uint32_t>(i + semantic.sink));
  }
  for (std::uint64_t i = layer.tokens() - recent; i < layer.tokens(); ++i) {
    kept.push_back(static_cast<std::uint32_t>(i));
  }
  return kept;
}

TEST(DecideSemantic, SemanticKvIsItsDefinition) {
  TestRandom random;
  for (int round = 0; round < 60; ++round) {
    ObservedLayerOptions form = RandomForm(random);
    ObservedLayer layer(form, ExactOperations(), random);
    layer.Grow(random.Between(1, 110));
    if (random.OneIn(3)) layer.Weigh(random);
    constexpr const char* kAggregates[] = {"mean", "max", "sum"};
    const auto percent = [&](std::uint64_t most) {
      return static_cast<double>(random.Between(1, most)) / 100;
    };
    const bool causal = random.OneIn(2);
    const Semantic semantic = {.lambda = percent(40),
                               .recent_ratio = percent(20),
                               .sink = random.Below(8),
                               .keep_total = percent(90),
                               .causal = causal,
                               .visible = causal && random.OneIn(2),
                               .agg = random.Pick(kAggregates)};
    const std::string text =
        Concat("semantickv:lambda=", semantic.lambda, ",recent_ratio=", semantic.recent_ratio,
               ",sink=", semantic.sink, ",keep_total=", semantic.keep_total,
               ",mask=", semantic.causal ? "causal" : "none",
               ",norm=", semantic.visible ? "visible" : "fixed", ",agg=", semantic.agg);
    SCOPED_TRACE(Concat(text, " of ", layer.tokens()));
    const LayerDecision decision = DecisionOf(text, layer);
    for (std::size_t lane = 0; lane < decision.size(); ++lane) {
      EXPECT_EQ(decision[lane].kept, PlainSemantic(layer, lane, semantic));
    }
  }
}

// If all queries judge, a token's score is its column sum of the full attention.
TEST(DecideSemantic, WithAllQueriesTheRankingIsThatOfColumnSums) {
  TestRandom random;
  ObservedLayer layer({}, ExactOperations(), random);
  layer.Grow(90);
  for (const std::size_t kept : {10u, 30u, 60u}) {
    const LayerDecision decision = DecisionOf(
        Concat("semantickv:lambda=1,sink=0,recent_ratio=0,keep_total=", kept, "e-2"), layer);
    for (std::size_t lane = 0; lane < decision.size(); ++lane) {
      const std::vector<float> sums = layer.Sums(lane, 0);
      const std::size_t count = kept * 90 / 100;
      Indices32 expected =
          ReferenceTop(std::vector<double>(sums.begin(), sums.end() - 1), count - 1);
      expected.push_back(89);
      EXPECT_EQ(decision[lane].kept, expected);
    }
  }
}

TEST(DecideSemantic, KeepMiddleIsAShareOfWhatIsBetween) {
  TestRandom random;
  ObservedLayer layer({}, ExactOperations(), random);
  layer.Grow(100);
  const auto kept = [&](const char* options) {
    return DecisionOf(Concat("semantickv:sink=8,recent_ratio=.02,", options), layer)[0].kept.size();
  };
  EXPECT_EQ(kept("keep_middle=0.5"), 8u + 45 + 2);
  EXPECT_EQ(kept("keep_middle=0"), 10u);
  EXPECT_EQ(kept("keep_middle=1"), 100u);
  EXPECT_EQ(kept("keep_total=0.05"), 10u);  // sinks and newest are never dropped
}

// A worker may have observed queries of tokens that the lane does not hold yet.
TEST(DecideSemantic, QueriesBehindTheLaneDoNotJudge) {
  constexpr std::uint64_t kHeld = 100, kSeen = 120;
  TestRandom random;
  const Policy policy =
      *ParsePolicy("semantickv:sink=2,recent_ratio=0.05,lambda=0.1,keep_total=0.3");
  for (int round = 0; round < 20; ++round) {
    ObservedLayer layer({}, kernels::OperationsOf(*kernels::Implementations().front()), random);
    layer.Grow(kSeen);
    Needs all = NeedsOf(policy);
    all.last_queries = kSeen;
    LayerView more = layer.Show(all, kSeen);
    std::vector<LaneEntries> lanes(more.lanes.begin(), more.lanes.end());
    for (LaneEntries& lane : lanes) {
      lane.count = kHeld;
      lane.positions = lane.positions.first(kHeld);
      lane.weights = lane.weights.first(std::min<std::size_t>(lane.weights.size(), kHeld));
    }
    more.lanes = lanes;
    more.tokens = kHeld;
    LayerView less = more;
    std::vector<HeadQueries> queries(more.queries.begin(), more.queries.end());
    for (HeadQueries& head : queries) head.positions = head.positions.first(kHeld);
    less.queries = queries;
    LayerMemory memory;
    const auto with = Decide(policy, more, memory);
    const auto without = Decide(policy, less, memory);
    ASSERT_TRUE(with.ok() && without.ok()) << with.status() << without.status();
    for (std::size_t lane = 0; lane < with->size(); ++lane) {
      EXPECT_EQ((*with)[lane].kept, (*without)[lane].kept);
    }
  }
}

}  // namespace
}  // namespace tessera::policies
