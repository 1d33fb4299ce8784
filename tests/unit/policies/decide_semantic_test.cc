// SemanticKV and SemantiCache against their definitions.
#include <cmath>
#include <numeric>
#include <set>

#include "daemon/base/strings.h"
#include "tests/unit/policies/decide.h"

namespace tessera::policies {
namespace {

using testing::HasSubstr;

double SquaredLength(const ShownLayer::Row& row) {
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

// The positions of the queries that judge.
std::set<std::uint64_t> PlainObservers(ShownLayer& layer, std::uint32_t head,
                                       const Semantic& semantic, std::uint64_t recent) {
  const std::uint64_t tokens = layer.tokens();
  std::vector<double> lengths;
  for (const ShownLayer::Row& row : layer.queries()[head]) lengths.push_back(SquaredLength(row));
  const auto count =
      static_cast<std::size_t>(std::ceil(semantic.lambda * static_cast<double>(tokens) - 1e-6));
  std::set<std::uint64_t> observers;
  for (const std::uint32_t i : PlainTop(lengths, count)) observers.insert(i);
  for (std::uint64_t i = tokens - recent; i < tokens; ++i) observers.insert(i);
  return observers;
}

std::vector<double> PlainScores(ShownLayer& layer, std::size_t lane, const Semantic& semantic,
                                std::uint64_t recent) {
  std::vector<double> scores(layer.tokens());
  const std::uint32_t group = layer.group();
  for (std::uint32_t i = 0; i < group; ++i) {
    const std::uint32_t head = static_cast<std::uint32_t>(lane) * group + i;
    const std::set<std::uint64_t> observers = PlainObservers(layer, head, semantic, recent);
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

Indices32 PlainSemantic(ShownLayer& layer, std::size_t lane, const Semantic& semantic) {
  const double n = static_cast<double>(layer.tokens());
  const std::uint64_t recent = std::max<std::uint64_t>(
      1, static_cast<std::uint64_t>(std::ceil(semantic.recent_ratio * n - 1e-6)));
  const auto total = static_cast<std::int64_t>(std::floor(semantic.keep_total * n + 1e-6));
  const std::int64_t middle =
      std::max<std::int64_t>(0, total - static_cast<std::int64_t>(semantic.sink + recent));
  if (semantic.sink + recent + static_cast<std::uint64_t>(middle) >= layer.tokens()) {
    return layer.AllOf(lane);
  }
  const std::vector<double> scores = PlainScores(layer, lane, semantic, recent);
  const std::vector<double> between(scores.begin() + static_cast<std::ptrdiff_t>(semantic.sink),
                                    scores.end() - static_cast<std::ptrdiff_t>(recent));
  Indices32 kept(semantic.sink);
  std::iota(kept.begin(), kept.end(), 0u);
  for (const std::uint32_t i : PlainTop(between, static_cast<std::size_t>(middle))) {
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
    ShownLayerOptions form = RandomForm(random);
    ShownLayer layer(form, ExactOperations(), random);
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

// All queries judge: what a token is paid is its column of the full attention.
TEST(DecideSemantic, WithAllQueriesTheRankingIsThatOfColumnSums) {
  TestRandom random;
  ShownLayer layer({}, ExactOperations(), random);
  layer.Grow(90);
  for (const std::size_t kept : {10u, 30u, 60u}) {
    const LayerDecision decision = DecisionOf(
        Concat("semantickv:lambda=1,sink=0,recent_ratio=0,keep_total=", kept, "e-2"), layer);
    for (std::size_t lane = 0; lane < decision.size(); ++lane) {
      const std::vector<float> sums = layer.Sums(lane, 0);
      const std::size_t count = kept * 90 / 100;
      Indices32 expected = PlainTop(std::vector<double>(sums.begin(), sums.end() - 1), count - 1);
      expected.push_back(89);
      EXPECT_EQ(decision[lane].kept, expected);
    }
  }
}

TEST(DecideSemantic, KeepMiddleIsAShareOfWhatIsBetween) {
  TestRandom random;
  ShownLayer layer({}, ExactOperations(), random);
  layer.Grow(100);
  const auto kept = [&](const char* options) {
    return DecisionOf(Concat("semantickv:sink=8,recent_ratio=.02,", options), layer)[0].kept.size();
  };
  EXPECT_EQ(kept("keep_middle=0.5"), 8u + 45 + 2);
  EXPECT_EQ(kept("keep_middle=0"), 10u);
  EXPECT_EQ(kept("keep_middle=1"), 100u);
  EXPECT_EQ(kept("keep_total=0.05"), 10u);  // sinks and newest are never dropped
}

double PlainCosine(ShownLayer& layer, const std::vector<std::size_t>& lanes, std::size_t i,
                   std::size_t j) {
  double dot = 0;
  double a = 0;
  double b = 0;
  for (const std::size_t lane : lanes) {
    const auto& entries = layer.lanes()[lane];
    for (std::size_t c = 0; c < entries[i].key.size(); ++c) {
      dot += double{entries[i].key[c]} * entries[j].key[c];
    }
    a += SquaredLength(entries[i].key);
    b += SquaredLength(entries[j].key);
  }
  return a == 0 || b == 0 ? 0 : std::clamp(dot / std::sqrt(a * b), -1.0, 1.0);
}

struct Clusters {
  double tau = 0.7;
  std::uint64_t max_chunk = 256;
  std::uint64_t sink = 0;
  std::uint64_t recent = 0;
  bool leave_open = false;
  bool per_layer = false;
  bool delimiters = true;

  bool EndsAt(ShownLayer& layer, std::uint64_t token) const {
    return delimiters && token < layer.text().size() && layer.text()[token] == TextMark::kDelimiter;
  }
};

// By entry of a lane the chunk that it is in, and behind them that of the next token; 0 is the
// first. `ends`: where chunks have ended because they were full, and those that do now.
std::vector<std::uint64_t> PlainChunks(ShownLayer& layer, std::size_t lane,
                                       const Clusters& clusters, std::set<std::uint64_t>& ends) {
  std::vector<std::uint64_t> chunks;
  std::uint64_t chunk = 0;
  std::uint64_t length = 0;
  std::uint64_t token = 0;
  const auto go_to = [&](std::uint64_t position) {
    for (; token < position; ++token) {
      if (!clusters.EndsAt(layer, token) && !ends.contains(token + 1)) continue;
      ++chunk;
      length = 0;
    }
  };
  for (const ShownLayer::Entry& entry : layer.lanes()[lane]) {
    go_to(entry.position);
    chunks.push_back(chunk);
    if (++length == clusters.max_chunk) ends.insert(entry.position + 1);
  }
  go_to(layer.tokens());
  chunks.push_back(chunk);
  return chunks;
}

// By entry, the first of its cluster.
Indices32 PlainSeeds(ShownLayer& layer, std::size_t lane, const Clusters& clusters,
                     std::set<std::uint64_t>& ends) {
  const auto& entries = layer.lanes()[lane];
  std::vector<std::size_t> lanes = {lane};
  if (clusters.per_layer) {
    lanes.resize(layer.lanes().size());
    std::iota(lanes.begin(), lanes.end(), std::size_t{0});
  }
  const std::vector<std::uint64_t> chunks = PlainChunks(layer, lane, clusters, ends);
  const auto alone = [&](std::size_t i) {
    return clusters.EndsAt(layer, entries[i].position) || i < clusters.sink ||
           i + clusters.recent >= entries.size() ||
           (clusters.leave_open && chunks[i] == chunks.back());
  };
  Indices32 seeds(entries.size());
  for (std::uint32_t i = 0; i < entries.size(); ++i) {
    seeds[i] = i;
    if (alone(i)) continue;
    for (std::uint32_t j = 0; j < i; ++j) {
      if (seeds[j] != j || alone(j) || chunks[i] != chunks[j]) continue;
      if (PlainCosine(layer, lanes, j, i) > clusters.tau) {
        seeds[i] = j;
        break;
      }
    }
  }
  return seeds;
}
Indices32 PlainSeeds(ShownLayer& layer, std::size_t lane, const Clusters& clusters) {
  std::set<std::uint64_t> ends;
  return PlainSeeds(layer, lane, clusters, ends);
}

Indices32 SeedsOf(const LaneDecision& decision, std::size_t entries) {
  Indices32 seeds(entries, ~0u);
  for (std::size_t i = 0; i < decision.kept.size(); ++i) {
    if (!decision.merges()) {
      seeds[decision.kept[i]] = decision.kept[i];
      continue;
    }
    EXPECT_EQ(decision.members[decision.begins[i]], decision.kept[i]);
    for (std::uint32_t m = decision.begins[i]; m < decision.begins[i + 1]; ++m) {
      seeds[decision.members[m]] = decision.kept[i];
    }
  }
  return seeds;
}

// Keys around a few directions, and delimiters here and there.
void MakeText(ShownLayer& layer, std::uint64_t tokens, TestRandom& random) {
  const std::uint64_t first = layer.tokens();
  layer.Grow(tokens);
  layer.text().resize(layer.tokens());
  for (std::uint64_t t = first; t < layer.tokens(); ++t) {
    layer.text()[t] = random.OneIn(12) ? TextMark::kDelimiter : TextMark::kInside;
  }
  std::vector<ShownLayer::Row> topics;
  for (int i = 0; i < 3; ++i) topics.push_back(layer.RandomRow());
  for (auto& lane : layer.lanes()) {
    for (std::size_t i = lane.size() - tokens; i < lane.size(); ++i) {
      const ShownLayer::Row& topic = random.Pick(topics);
      for (std::size_t c = 0; c < topic.size(); ++c) {
        lane[i].key[c] =
            kernels::Bf16ToFloat(kernels::FloatToBf16(topic[c] + 0.6f * lane[i].key[c]));
      }
    }
  }
}

Clusters RandomClusters(TestRandom& random) {
  return {.tau = static_cast<double>(random.Between(1, 99)) / 100 + 0.00037,
          .max_chunk = random.OneIn(2) ? 256 : random.Between(1, 12),
          .sink = random.Below(5),
          .recent = random.Below(9),
          .leave_open = random.OneIn(2),
          .per_layer = random.OneIn(3),
          .delimiters = !random.OneIn(3)};
}

std::string TextOf(const Clusters& clusters) {
  return Concat("semanticache:tau=", clusters.tau, ",max_chunk=", clusters.max_chunk,
                ",sink=", clusters.sink, ",recent=", clusters.recent,
                ",leave_open=", clusters.leave_open ? 1 : 0,
                ",delimiters=", clusters.delimiters ? 1 : 0,
                ",scope=", clusters.per_layer ? "layer" : "head");
}

TEST(DecideSemantic, SemantiCacheIsItsDefinition) {
  TestRandom random;
  int merged = 0;
  for (int round = 0; round < 60; ++round) {
    ShownLayer layer(RandomForm(random), ExactOperations(), random);
    MakeText(layer, random.Between(1, 90), random);
    const Clusters clusters = RandomClusters(random);
    SCOPED_TRACE(TextOf(clusters));
    // A chunk that is being decoded is open, whatever the option says of a prompt's.
    const std::uint64_t decoded = random.OneIn(3) ? random.Between(1, layer.tokens()) : 0;
    LayerMemory memory;
    const LayerDecision decision = DecisionOf(TextOf(clusters), layer, memory, decoded);
    Clusters expected = clusters;
    expected.leave_open = clusters.leave_open || decoded > 0;
    for (std::size_t lane = 0; lane < decision.size(); ++lane) {
      EXPECT_EQ(SeedsOf(decision[lane], layer.lanes()[lane].size()),
                PlainSeeds(layer, lane, expected));
      merged += decision[lane].merges() ? 1 : 0;
    }
  }
  EXPECT_GT(merged, 20);
}

// However often: weights add up to the tokens, and nothing is merged across a chunk's end.
TEST(DecideSemantic, WeightsAddUpToTheTokens) {
  TestRandom random;
  for (int round = 0; round < 20; ++round) {
    ShownLayer layer(RandomForm(random), ExactOperations(), random);
    const Clusters clusters = RandomClusters(random);
    SCOPED_TRACE(TextOf(clusters));
    LayerMemory memory;
    std::vector<std::set<std::uint64_t>> ends(layer.lanes().size());
    for (int pass = 0; pass < 5; ++pass) {
      if (pass == 0 || random.OneIn(2)) MakeText(layer, random.Between(1, 60), random);
      const auto before = layer.lanes();
      // Entries have become fewer in some lanes than in others.
      memory.clustered_until = 0;  // chunks that were clustered before are clustered again
      const LayerDecision decision = DecisionOf(TextOf(clusters), layer, memory);
      for (std::size_t lane = 0; lane < decision.size(); ++lane) {
        EXPECT_EQ(SeedsOf(decision[lane], before[lane].size()),
                  PlainSeeds(layer, lane, clusters, ends[lane]));
      }
      layer.Apply(decision);
      for (const auto& lane : layer.lanes()) {
        double sum = 0;
        for (const auto& entry : lane) sum += entry.weight;
        EXPECT_EQ(sum, static_cast<double>(layer.tokens()));
      }
    }
  }
}

TEST(DecideSemantic, AtTauOneNothingMerges) {
  TestRandom random;
  ShownLayer layer({}, ExactOperations(), random);
  layer.Grow(50);
  for (auto& lane : layer.lanes()) {
    for (auto& entry : lane) entry.key = lane[0].key;
  }
  for (const LaneDecision& lane : DecisionOf("semanticache:tau=1,sink=0,recent=0", layer)) {
    EXPECT_FALSE(lane.merges());
    EXPECT_EQ(lane.kept.size(), 50u);
  }
  for (const LaneDecision& lane : DecisionOf("semanticache:tau=0.99,sink=0,recent=0", layer)) {
    EXPECT_TRUE(lane.merges());
    EXPECT_EQ(lane.kept.size(), 1u);
  }
}

// The keys of a cluster are equal: attention over what is left, each counted so often, pays what
// attention over all of them pays.
TEST(DecideSemantic, EqualKeysMergeWithoutLoss) {
  TestRandom random;
  ShownLayer layer({.query_heads = 1, .kv_heads = 1}, ExactOperations(), random);
  layer.Grow(60);
  auto& lane = layer.lanes()[0];
  for (std::size_t i = 8; i < 60; ++i) lane[i].key = lane[i % 8].key;
  const std::vector<double> all = layer.Shares(0, 59, layer.AllOf(0));
  const LayerDecision decision = DecisionOf("semanticache:tau=0.99,sink=0,recent=0", layer);
  layer.Apply(decision);
  ASSERT_EQ(lane.size(), 8u);
  const std::vector<double> shares = layer.Shares(0, 59, layer.AllOf(0));
  for (std::size_t i = 0; i < 8; ++i) {
    double expected = 0;
    for (std::size_t j = i; j < 60; j += 8) expected += all[j];
    EXPECT_NEAR(shares[i], expected, 1e-6);
  }
}

TEST(DecideSemantic, ABudgetTakesTheLargestTauThatFits) {
  TestRandom random;
  for (int round = 0; round < 15; ++round) {
    ShownLayer layer({.query_heads = 2, .kv_heads = 2}, ExactOperations(), random);
    MakeText(layer, 80, random);
    Clusters clusters = {.sink = 2, .recent = 4, .per_layer = random.OneIn(2)};
    std::vector<std::size_t> totals;
    for (int step = 0; step <= 128; ++step) {
      clusters.tau = step / 128.0;
      std::size_t total = 0;
      for (std::size_t lane = 0; lane < 2; ++lane) {
        const Indices32 seeds = PlainSeeds(layer, lane, clusters);
        total += std::set<std::uint32_t>(seeds.begin(), seeds.end()).size();
      }
      totals.push_back(total);
    }
    const std::size_t least = *std::ranges::min_element(totals);
    const std::size_t budget = random.Between(least, 160);
    int step = 128;
    while (totals[static_cast<std::size_t>(step)] > budget) --step;
    const std::string tail =
        Concat(",sink=2,recent=4,scope=", clusters.per_layer ? "layer" : "head");
    const LayerDecision by_budget =
        DecisionOf(Concat("semanticache:budget=", static_cast<double>(budget) / 160, tail), layer);
    const LayerDecision by_tau = DecisionOf(Concat("semanticache:tau=", step / 128.0, tail), layer);
    EXPECT_EQ(KeptOf(by_budget), KeptOf(by_tau)) << budget << " of " << least;

    const Policy policy = Parsed(Concat("semanticache:budget=0.01", tail));
    LayerMemory memory;
    const absl::Status status =
        Decide(policy, layer.Show(NeedsOf(policy), layer.tokens()), memory).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(AsStringView(status.message())),
                HasSubstr(Concat("no tau leaves less than ", least, "; a budget of ")));

    // While tokens are decoded nothing can be done about those of their chunk.
    clusters.leave_open = true;
    std::size_t least_decoding = 160;
    for (int step_now = 0; step_now <= 128; ++step_now) {
      clusters.tau = step_now / 128.0;
      std::size_t total = 0;
      for (std::size_t lane = 0; lane < 2; ++lane) {
        const Indices32 seeds = PlainSeeds(layer, lane, clusters);
        total += std::set<std::uint32_t>(seeds.begin(), seeds.end()).size();
      }
      least_decoding = std::min(least_decoding, total);
    }
    std::size_t enough = least_decoding;
    std::set<std::uint64_t> ends;
    const std::vector<std::uint64_t> chunks = PlainChunks(layer, 0, clusters, ends);
    for (std::uint64_t t = clusters.sink; t < 80 - clusters.recent; ++t) {
      if (chunks[t] == chunks.back()) enough -= 2;
    }
    const auto decoding = [&](std::size_t entries) {
      return Concat("semanticache:budget=", static_cast<double>(entries) / 160, tail);
    };
    std::size_t kept = 0;
    for (const LaneDecision& lane : DecisionOf(decoding(enough), layer, memory, /*decoded=*/1)) {
      kept += lane.kept.size();
    }
    EXPECT_EQ(kept, least_decoding);
    const Policy too_small = Parsed(decoding(enough - 1));
    const absl::Status refused =
        Decide(too_small, layer.Show(NeedsOf(too_small), layer.tokens() - 1), memory).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
  }
}

// A worker may have shown those of tokens that the lane does not hold yet.
TEST(DecideSemantic, QueriesBehindTheLaneDoNotJudge) {
  constexpr std::uint64_t kHeld = 100, kSeen = 120;
  TestRandom random;
  const Policy policy =
      *ParsePolicy("semantickv:sink=2,recent_ratio=0.05,lambda=0.1,keep_total=0.3");
  for (int round = 0; round < 20; ++round) {
    ShownLayer layer({}, kernels::OperationsOf(*kernels::Implementations().front()), random);
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
