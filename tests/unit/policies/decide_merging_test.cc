// SemantiCache, compared with its definition.
#include <cmath>
#include <numeric>
#include <set>

#include "daemon/base/strings.h"
#include "tests/unit/policies/decide.h"

namespace tessera::policies {
namespace {

using testing::HasSubstr;

double SquaredLength(const ObservedLayer::Row& row) {
  double sum = 0;
  for (const float number : row) sum += double{number} * number;
  return sum;
}

double PlainCosine(ObservedLayer& layer, const std::vector<std::size_t>& lanes, std::size_t i,
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

  bool EndsAt(ObservedLayer& layer, std::uint64_t token) const {
    return delimiters && token < layer.text().size() && layer.text()[token] == TextMark::kDelimiter;
  }
};

// Chunk numbers by entry of a lane, followed by that of the next token; the first is 0. `ends`:
// positions where full chunks have ended, old and new.
std::vector<std::uint64_t> ReferenceChunks(ObservedLayer& layer, std::size_t lane,
                                           const Clusters& clusters,
                                           std::set<std::uint64_t>& ends) {
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
  for (const ObservedLayer::Entry& entry : layer.lanes()[lane]) {
    go_to(entry.position);
    chunks.push_back(chunk);
    if (++length == clusters.max_chunk) ends.insert(entry.position + 1);
  }
  go_to(layer.tokens());
  chunks.push_back(chunk);
  return chunks;
}

// By entry, the first entry of its cluster.
Indices32 ReferenceSeeds(ObservedLayer& layer, std::size_t lane, const Clusters& clusters,
                         std::set<std::uint64_t>& ends) {
  const auto& entries = layer.lanes()[lane];
  std::vector<std::size_t> lanes = {lane};
  if (clusters.per_layer) {
    lanes.resize(layer.lanes().size());
    std::iota(lanes.begin(), lanes.end(), std::size_t{0});
  }
  const std::vector<std::uint64_t> chunks = ReferenceChunks(layer, lane, clusters, ends);
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
Indices32 ReferenceSeeds(ObservedLayer& layer, std::size_t lane, const Clusters& clusters) {
  std::set<std::uint64_t> ends;
  return ReferenceSeeds(layer, lane, clusters, ends);
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

// Keys around a few directions, and some delimiters.
void MakeText(ObservedLayer& layer, std::uint64_t tokens, TestRandom& random) {
  const std::uint64_t first = layer.tokens();
  layer.Grow(tokens);
  layer.text().resize(layer.tokens());
  for (std::uint64_t t = first; t < layer.tokens(); ++t) {
    layer.text()[t] = random.OneIn(12) ? TextMark::kDelimiter : TextMark::kInside;
  }
  std::vector<ObservedLayer::Row> topics;
  for (int i = 0; i < 3; ++i) topics.push_back(layer.RandomRow());
  for (auto& lane : layer.lanes()) {
    for (std::size_t i = lane.size() - tokens; i < lane.size(); ++i) {
      const ObservedLayer::Row& topic = random.Pick(topics);
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

TEST(DecideMerging, SemantiCacheIsItsDefinition) {
  TestRandom random;
  int merged = 0;
  for (int round = 0; round < 60; ++round) {
    ObservedLayer layer(RandomForm(random), ExactOperations(), random);
    MakeText(layer, random.Between(1, 90), random);
    const Clusters clusters = RandomClusters(random);
    SCOPED_TRACE(TextOf(clusters));
    // A chunk being decoded is open, whatever the option says about a prompt's last chunk.
    const std::uint64_t decoded = random.OneIn(3) ? random.Between(1, layer.tokens()) : 0;
    LayerMemory memory;
    const LayerDecision decision = DecisionOf(TextOf(clusters), layer, memory, decoded);
    Clusters expected = clusters;
    expected.leave_open = clusters.leave_open || decoded > 0;
    for (std::size_t lane = 0; lane < decision.size(); ++lane) {
      EXPECT_EQ(SeedsOf(decision[lane], layer.lanes()[lane].size()),
                ReferenceSeeds(layer, lane, expected));
      merged += decision[lane].merges() ? 1 : 0;
    }
  }
  EXPECT_GT(merged, 20);
}

// However often entries merge, weights add up to the number of tokens, and no cluster crosses a
// chunk's end.
TEST(DecideMerging, WeightsAddUpToTheTokens) {
  TestRandom random;
  for (int round = 0; round < 20; ++round) {
    ObservedLayer layer(RandomForm(random), ExactOperations(), random);
    const Clusters clusters = RandomClusters(random);
    SCOPED_TRACE(TextOf(clusters));
    LayerMemory memory;
    std::vector<std::set<std::uint64_t>> ends(layer.lanes().size());
    for (int pass = 0; pass < 5; ++pass) {
      if (pass == 0 || random.OneIn(2)) MakeText(layer, random.Between(1, 60), random);
      const auto before = layer.lanes();
      // Some lanes have lost more entries than others.
      memory.clustered_until = 0;  // chunks that were clustered before are clustered again
      const LayerDecision decision = DecisionOf(TextOf(clusters), layer, memory);
      for (std::size_t lane = 0; lane < decision.size(); ++lane) {
        EXPECT_EQ(SeedsOf(decision[lane], before[lane].size()),
                  ReferenceSeeds(layer, lane, clusters, ends[lane]));
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

TEST(DecideMerging, AtTauOneNothingMerges) {
  TestRandom random;
  ObservedLayer layer({}, ExactOperations(), random);
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

// The keys of a cluster are equal, so attention over the weighted clusters equals attention over
// all entries.
TEST(DecideMerging, EqualKeysMergeWithoutLoss) {
  TestRandom random;
  ObservedLayer layer({.query_heads = 1, .kv_heads = 1}, ExactOperations(), random);
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

TEST(DecideMerging, ABudgetTakesTheLargestTauThatFits) {
  TestRandom random;
  for (int round = 0; round < 15; ++round) {
    ObservedLayer layer({.query_heads = 2, .kv_heads = 2}, ExactOperations(), random);
    MakeText(layer, 80, random);
    Clusters clusters = {.sink = 2, .recent = 4, .per_layer = random.OneIn(2)};
    std::vector<std::size_t> totals;
    for (int step = 0; step <= 128; ++step) {
      clusters.tau = step / 128.0;
      std::size_t total = 0;
      for (std::size_t lane = 0; lane < 2; ++lane) {
        const Indices32 seeds = ReferenceSeeds(layer, lane, clusters);
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
                HasSubstr(Concat("no tau leaves fewer than ", least, "; a budget of ")));

    // While decoding, tokens of the open chunk are left alone.
    clusters.leave_open = true;
    std::size_t least_decoding = 160;
    for (int step_now = 0; step_now <= 128; ++step_now) {
      clusters.tau = step_now / 128.0;
      std::size_t total = 0;
      for (std::size_t lane = 0; lane < 2; ++lane) {
        const Indices32 seeds = ReferenceSeeds(layer, lane, clusters);
        total += std::set<std::uint32_t>(seeds.begin(), seeds.end()).size();
      }
      least_decoding = std::min(least_decoding, total);
    }
    std::size_t enough = least_decoding;
    std::set<std::uint64_t> ends;
    const std::vector<std::uint64_t> chunks = ReferenceChunks(layer, 0, clusters, ends);
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

}  // namespace
}  // namespace tessera::policies
