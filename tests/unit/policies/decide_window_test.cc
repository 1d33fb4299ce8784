// SnapKV, PyramidKV and ChunkKV, compared with their definitions.
#include <cmath>
#include <map>
#include <numeric>

#include "daemon/base/strings.h"
#include "tests/unit/policies/decide.h"

namespace tessera::policies {
namespace {

// The attention that a head's newest `window` queries pay to each entry.
std::vector<double> WindowSums(const ObservedLayer& layer, std::uint32_t head,
                               std::uint64_t window) {
  const Indices32 all = layer.AllOf(head / layer.group());
  std::vector<double> sums(all.size());
  for (std::uint64_t query = layer.tokens() - window; query < layer.tokens(); ++query) {
    const std::vector<double> shares = layer.Shares(head, query, all);
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += shares[i];
  }
  return sums;
}

std::vector<double> PlainPool(const std::vector<double>& scores, int kernel, bool largest) {
  std::vector<double> pooled;
  for (int i = 0; i < std::ssize(scores); ++i) {
    double sum = 0;
    double most = -1;
    for (int j = i - kernel / 2; j <= i + kernel / 2; ++j) {
      if (j < 0 || j >= std::ssize(scores)) continue;
      sum += scores[static_cast<std::size_t>(j)];
      most = std::max(most, scores[static_cast<std::size_t>(j)]);
    }
    pooled.push_back(largest ? most : sum / kernel);
  }
  return pooled;
}

struct Snap {
  std::uint64_t window = 32;
  int kernel = 5;
  bool largest = false;
};

std::vector<double> PlainSnapScores(const ObservedLayer& layer, std::size_t lane,
                                    const Snap& snap) {
  std::vector<double> scores;
  for (std::uint32_t i = 0; i < layer.group(); ++i) {
    std::vector<double> sums =
        WindowSums(layer, static_cast<std::uint32_t>(lane) * layer.group() + i, snap.window);
    sums.resize(sums.size() - snap.window);
    sums = PlainPool(sums, snap.kernel, snap.largest);
    scores.resize(sums.size());
    for (std::size_t j = 0; j < sums.size(); ++j) {
      scores[j] += sums[j] / static_cast<double>(snap.window) / layer.group();
    }
  }
  return scores;
}

Indices32 PlainSnap(const ObservedLayer& layer, std::size_t lane, const Snap& snap,
                    std::uint64_t entries) {
  const std::uint64_t tokens = layer.tokens();
  if (tokens <= snap.window || tokens <= entries) return layer.AllOf(lane);
  Indices32 kept = ReferenceTop(PlainSnapScores(layer, lane, snap), entries - snap.window);
  for (std::uint64_t i = tokens - snap.window; i < tokens; ++i) {
    kept.push_back(static_cast<std::uint32_t>(i));
  }
  return kept;
}

TEST(DecideWindow, SnapKvIsItsDefinition) {
  TestRandom random;
  for (int round = 0; round < 60; ++round) {
    ObservedLayer layer(RandomForm(random), ExactOperations(), random);
    layer.Grow(random.Between(1, 120));
    if (random.OneIn(3)) layer.Weigh(random);
    const Snap snap = {.window = random.Between(1, 12),
                       .kernel = static_cast<int>(2 * random.Below(4) + 1),
                       .largest = random.OneIn(2)};
    const std::uint64_t tokens = snap.window + random.Below(60);
    const std::string text =
        Concat("snapkv:tokens=", tokens, ",window=", snap.window, ",kernel=", snap.kernel,
               ",pool=", snap.largest ? "max" : "avg");
    SCOPED_TRACE(text);
    const LayerDecision decision = DecisionOf(text, layer);
    for (std::size_t lane = 0; lane < decision.size(); ++lane) {
      EXPECT_EQ(decision[lane].kept, PlainSnap(layer, lane, snap, tokens));
    }
  }
}

// Each layer's entries follow the rule, and their mean is the budget.
TEST(DecideWindow, PyramidKvsLayersHaveTheBudgetOnAverage) {
  TestRandom random;
  for (const std::uint32_t layers : {32u, 64u, 128u}) {
    for (const double budget : {0.2, 0.35, 0.5, 0.8}) {
      double total = 0;
      std::size_t before = 1000;
      for (std::uint32_t layer = 0; layer < layers; ++layer) {
        ObservedLayer shown({.query_heads = 1, .kv_heads = 1, .layer = layer, .layers = layers},
                            ExactOperations(), random);
        shown.Grow(600);
        const std::string text = Concat("pyramidkv:window=4,budget=", budget);
        const std::size_t kept = DecisionOf(text, shown)[0].kept.size();
        EXPECT_LE(kept, before);  // never more than the previous layer
        before = kept;
        total += static_cast<double>(kept);
      }
      EXPECT_NEAR(total / layers / 600, budget, 1e-3) << layers;
    }
  }
}

TEST(DecideWindow, PyramidKvIsItsRule) {
  TestRandom random;
  int sloped = 0;
  for (int round = 0; round < 60; ++round) {
    ObservedLayerOptions form = RandomForm(random);
    form.layers = static_cast<std::uint32_t>(random.Between(1, 6));
    form.layer = static_cast<std::uint32_t>(random.Below(form.layers));
    ObservedLayer layer(form, ExactOperations(), random);
    layer.Grow(random.Between(20, 150));
    const double n = static_cast<double>(layer.tokens());
    const Snap snap = {.window = random.Between(1, 6)};
    const auto percent = random.Between(30, 95);
    const auto beta = random.Between(1, 30);
    const double budget = n * static_cast<double>(percent) / 100;
    const double w = static_cast<double>(snap.window);
    double least = budget / static_cast<double>(beta);
    double most = budget * 2 - least;
    if (most >= n - w) {
      most = n - w;
      least = budget * 2 - most;
    }
    double entries = budget;
    if (form.layers > 1 && n >= most && most >= least && least >= w) {
      entries = most - form.layer * (most - least) / (form.layers - 1);
      ++sloped;
    }
    const double half = entries - std::floor(entries) - 0.5;
    if (std::abs(half) < 1e-9) continue;  // another test covers the direction of rounding
    const std::string text =
        Concat("pyramidkv:window=", snap.window, ",beta=", beta, ",budget=", percent, "%");
    SCOPED_TRACE(text);
    const LayerDecision decision = DecisionOf(text, layer);
    for (std::size_t lane = 0; lane < decision.size(); ++lane) {
      EXPECT_EQ(decision[lane].kept,
                PlainSnap(layer, lane, snap, static_cast<std::uint64_t>(std::round(entries))));
    }
  }
  EXPECT_GT(sloped, 10);
}

// Like Python's round(): halves go to even.
TEST(DecideWindow, PyramidKvRoundsHalvesToEven) {
  TestRandom random;
  for (const auto& [tokens, kept] : {std::pair(50, 12), std::pair(54, 14)}) {  // 12.5, 13.5
    ObservedLayer layer({.layers = 1}, ExactOperations(), random);
    layer.Grow(static_cast<std::uint64_t>(tokens));
    EXPECT_EQ(DecisionOf("pyramidkv:window=4,budget=0.25", layer)[0].kept.size(),
              static_cast<std::size_t>(kept));
  }
}

struct Chunk {
  std::uint64_t size = 10;
  std::uint64_t window = 32;
  bool mean = false;
  bool logit = false;
  bool per_layer = true;
};

// Scores of a head's entries: mode paper's, or SnapKV's with the window above all.
std::vector<double> ReferenceTokenScores(const ObservedLayer& layer, std::size_t lane, bool kvpress,
                                         const Chunk& chunk) {
  if (kvpress) {
    double most = 0;
    for (std::size_t other = 0; other < layer.options().kv_heads; ++other) {
      for (const double score : PlainSnapScores(layer, other, {.window = chunk.window})) {
        most = std::max(most, score);
      }
    }
    std::vector<double> scores = PlainSnapScores(layer, lane, {.window = chunk.window});
    scores.resize(layer.tokens(), most + 1);
    return scores;
  }
  std::vector<double> scores(layer.tokens());
  for (std::uint32_t i = 0; i < layer.group(); ++i) {
    const std::uint32_t head = static_cast<std::uint32_t>(lane) * layer.group() + i;
    std::vector<double> sums(layer.tokens());
    if (!chunk.logit) {
      sums = WindowSums(layer, head, chunk.window);
    } else {
      for (std::uint64_t q = layer.tokens() - chunk.window; q < layer.tokens(); ++q) {
        for (std::uint64_t e = 0; e < layer.tokens(); ++e) sums[e] += layer.Product(head, q, e);
      }
    }
    for (std::uint64_t e = 0; e < layer.tokens(); ++e) scores[e] += sums[e] / layer.group();
  }
  return scores;
}

std::vector<double> PlainChunkScores(const std::vector<double>& scores, const Chunk& chunk) {
  std::vector<double> chunks;
  for (std::uint64_t begin = 0; begin < scores.size(); begin += chunk.size) {
    const std::uint64_t end = std::min<std::uint64_t>(scores.size(), begin + chunk.size);
    double sum = 0;
    for (std::uint64_t i = begin; i < end; ++i) sum += scores[i];
    chunks.push_back(chunk.mean ? sum / static_cast<double>(end - begin) : sum);
  }
  return chunks;
}

// Chunk indices, best first.
Indices32 BestFirst(const std::vector<double>& scores) {
  Indices32 order;
  for (std::size_t count = 1; count <= scores.size(); ++count) {
    for (const std::uint32_t i : ReferenceTop(scores, count)) {
      if (std::ranges::count(order, i) == 0) order.push_back(i);
    }
  }
  return order;
}

Indices32 PlainPaper(const std::vector<double>& scores, const Chunk& chunk, std::uint64_t entries) {
  const std::uint64_t tokens = scores.size();
  Indices32 kept;
  for (std::uint64_t i = tokens - chunk.window; i < tokens; ++i) {
    kept.push_back(static_cast<std::uint32_t>(i));
  }
  for (const std::uint32_t c : BestFirst(PlainChunkScores(scores, chunk))) {
    for (std::uint64_t i = c * chunk.size; i < (c + 1) * chunk.size; ++i) {
      if (i < tokens - chunk.window && kept.size() < entries) {
        kept.push_back(static_cast<std::uint32_t>(i));
      }
    }
  }
  std::ranges::sort(kept);
  return kept;
}

std::vector<std::vector<double>> ScoresByLane(const ObservedLayer& layer, bool kvpress,
                                              const Chunk& chunk) {
  std::vector<std::vector<double>> scores;
  for (std::size_t lane = 0; lane < layer.options().kv_heads; ++lane) {
    scores.push_back(ReferenceTokenScores(layer, lane, kvpress, chunk));
  }
  if (!chunk.per_layer) return scores;
  std::vector<double> sum(scores[0].size());
  for (const std::vector<double>& of_lane : scores) {
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += of_lane[i];
  }
  return std::vector<std::vector<double>>(scores.size(), sum);
}

TEST(DecideWindow, ChunkKvIsThePapersAlgorithm) {
  TestRandom random;
  for (int round = 0; round < 60; ++round) {
    ObservedLayer layer(RandomForm(random), ExactOperations(), random);
    const Chunk chunk = {.size = random.Between(1, 13),
                         .window = random.Between(1, 12),
                         .mean = random.OneIn(3),
                         .logit = random.OneIn(3),
                         .per_layer = random.OneIn(2)};
    layer.Grow(chunk.window + random.Between(1, 100));
    if (random.OneIn(3)) layer.Weigh(random);
    const std::uint64_t entries = chunk.window + random.Below(layer.tokens() - chunk.window);
    const std::string text =
        Concat("chunkkv:tokens=", entries, ",chunk=", chunk.size, ",window=", chunk.window,
               ",agg=", chunk.mean ? "mean" : "sum", ",score=", chunk.logit ? "logit" : "softmax",
               ",scope=", chunk.per_layer ? "layer" : "head");
    SCOPED_TRACE(text);
    const LayerDecision decision = DecisionOf(text, layer);
    const auto scores = ScoresByLane(layer, /*kvpress=*/false, chunk);
    for (std::size_t lane = 0; lane < decision.size(); ++lane) {
      EXPECT_EQ(decision[lane].kept, PlainPaper(scores[lane], chunk, entries));
    }
  }
}

// int(20 * (1 - 0.8)) is 3.
TEST(DecideWindow, KvpressTruncatesWhatStays) {
  TestRandom random;
  ObservedLayer layer(RandomForm(random), ExactOperations(), random);
  layer.Grow(100);
  for (const LaneDecision& lane :
       DecisionOf("chunkkv:mode=kvpress,budget=20%,chunk=5,window=5", layer)) {
    EXPECT_EQ(lane.kept.size(), 15u);
  }
}

TEST(DecideWindow, ChunkKvIsKvpresss) {
  TestRandom random;
  for (int round = 0; round < 40; ++round) {
    ObservedLayer layer(RandomForm(random), ExactOperations(), random);
    Chunk chunk = {.size = random.Between(1, 25),
                   .window = random.Between(1, 12),
                   .mean = true,
                   .per_layer = random.OneIn(2)};
    layer.Grow(chunk.window + random.Between(1, 100));
    const auto percent = random.Between(1, 100);
    const std::string text =
        Concat("chunkkv:mode=kvpress,budget=", percent, "%,chunk=", chunk.size,
               ",window=", chunk.window, ",scope=", chunk.per_layer ? "layer" : "head");
    SCOPED_TRACE(text);
    const LayerDecision decision = DecisionOf(text, layer);
    const auto scores = ScoresByLane(layer, /*kvpress=*/true, chunk);
    if (layer.tokens() < chunk.size) chunk.size = 1;
    for (std::size_t lane = 0; lane < decision.size(); ++lane) {
      std::vector<double> chunks = PlainChunkScores(scores[lane], chunk);
      // Chunks entirely inside the window come first, the newest of them before the others.
      for (std::size_t c = 0; c < chunks.size(); ++c) {
        if (c * chunk.size >= layer.tokens() - chunk.window) {
          chunks[c] = 1e6 + static_cast<double>(c);
        }
      }
      // compression_ratio is the share that is evicted.
      const double compression_ratio = 1 - static_cast<double>(percent) / 100;
      const auto count = std::max<std::size_t>(
          1,
          static_cast<std::size_t>(static_cast<double>(chunks.size()) * (1 - compression_ratio)));
      Indices32 kept;
      for (const std::uint32_t c : ReferenceTop(chunks, count)) {
        for (std::uint64_t i = c * chunk.size;
             i < std::min<std::uint64_t>(layer.tokens(), (c + 1) * chunk.size); ++i) {
          kept.push_back(static_cast<std::uint32_t>(i));
        }
      }
      EXPECT_EQ(decision[lane].kept, kept);
    }
  }
}

// Chunks of one token: the tokens with the largest scores, unsmoothed.
TEST(DecideWindow, ChunksOfOneAreTokens) {
  TestRandom random;
  for (int round = 0; round < 20; ++round) {
    ObservedLayer layer({}, ExactOperations(), random);
    layer.Grow(60);
    EXPECT_EQ(KeptOf(DecisionOf("chunkkv:chunk=1,window=7,tokens=20,scope=head", layer)),
              KeptOf(DecisionOf("snapkv:kernel=1,window=7,tokens=20", layer)));
  }
}

TEST(DecideWindow, LayersThatReuseShareADecision) {
  const Policy policy = Parsed("chunkkv:reuse=3");
  for (std::uint32_t layer = 0; layer < 20; ++layer) {
    EXPECT_EQ(DecidesFor(policy, layer), layer - layer % 3);
    EXPECT_EQ(DecidesFor(Parsed("chunkkv"), layer), layer);
    EXPECT_EQ(DecidesFor(Parsed("snapkv"), layer), layer);
    EXPECT_EQ(DecidesFor(Parsed("mosaickv"), layer), layer);
  }
}

// A second prompt after a compacted one: chunks are cells of the same grid.
TEST(DecideWindow, ChunksGoByPositionNotByIndex) {
  TestRandom random;
  ObservedLayer layer({}, ExactOperations(), random);
  layer.Grow(80);
  layer.Apply(DecisionOf("chunkkv:tokens=30,window=5,chunk=7", layer));
  layer.Grow(40);
  const LayerDecision decision = DecisionOf("chunkkv:tokens=40,window=5,chunk=7", layer);
  ASSERT_EQ(decision[0].kept.size(), 40u);
  // All chunks except one are kept or dropped entirely.
  std::map<std::uint64_t, std::pair<int, int>> cells;  // entries, and kept ones
  const auto& lane = layer.lanes()[0];
  for (std::uint32_t i = 0; i + 5 < lane.size(); ++i) ++cells[lane[i].position / 7].first;
  for (const std::uint32_t i : decision[0].kept) {
    if (i + 5 < lane.size()) ++cells[lane[i].position / 7].second;
  }
  int parted = 0;
  for (const auto& [cell, counts] : cells) {
    if (counts.second != 0 && counts.second != counts.first) ++parted;
  }
  EXPECT_LE(parted, 1);
}

// Earlier tokens are not visible, but the cells are those of the whole sequence.
TEST(DecideWindow, TheGridOfChunksBeginsWithTheSequence) {
  TestRandom random;
  ObservedLayer layer({}, ExactOperations(), random);
  layer.Grow(70);
  const Policy policy = Parsed("chunkkv:tokens=30,window=5,chunk=7");
  for (std::uint64_t first = 0; first < 20; ++first) {
    LayerView view = layer.Show(NeedsOf(policy), layer.tokens());
    view.first = first;
    LayerMemory memory;
    const auto decision = Decide(policy, view, memory);
    ASSERT_TRUE(decision.ok()) << decision.status();
    std::map<std::uint64_t, std::pair<int, int>> cells;  // entries, and kept ones
    for (std::uint32_t i = 0; i + 5 < 70; ++i) ++cells[(first + i) / 7].first;
    for (const std::uint32_t i : (*decision)[0].kept) {
      if (i + 5 < 70) ++cells[(first + i) / 7].second;
    }
    int parted = 0;
    for (const auto& [cell, counts] : cells) {
      if (counts.second != 0 && counts.second != counts.first) ++parted;
    }
    EXPECT_LE(parted, 1) << first;
  }
}

}  // namespace
}  // namespace tessera::policies
