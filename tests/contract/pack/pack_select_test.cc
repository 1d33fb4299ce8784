// Scores of blocks, and the selection among them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "kernels/format/error_bound.h"
#include "tests/contract/attend/attend_batch.h"
#include "tests/contract/pack/pack_conformance.h"

namespace tessera::kernels {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Tiles with summaries, and queries for them.
struct ScoreCase {
  ScoreCase(const Operations& reference, const TileShape& tile_shape, TestRandom& random)
      : shape(tile_shape), rows(static_cast<std::uint32_t>(random.Between(1, 32))) {
    const ElementType type = shape.packed() ? ElementType::kBf16 : ElementsOf(shape.format);
    for (std::uint64_t count = random.Between(1, 5); count > 0; --count) {
      const auto entries = static_cast<std::uint32_t>(random.OneIn(2) ? 32 : random.Between(1, 32));
      const TileInput input(shape, type, entries, Content::kNormal, random);
      auto& tile = tiles.emplace_back(*EncodeTile(reference, shape, input, {}));
      PoisonDeadRows(shape, entries, tile.data());
      const std::uint32_t blocks = (entries + shape.block - 1) / shape.block;
      const TileLayout layout = LayoutOf(shape);
      summaries.push_back(std::make_unique<Buffer>(layout.summary_bytes));
      std::memcpy(summaries.back()->data(), SummariesAfter(tile.data(), layout),
                  layout.summary_bytes);
      runs.push_back({.summaries = summaries.back()->data(),
                      .tile = nullptr,
                      .blocks = blocks,
                      .last_entries = entries - (blocks - 1) * shape.block});
      total += blocks;
    }
    for (std::size_t i = 0; i < tiles.size(); ++i) runs[i].tile = tiles[i].data();
    const std::uint32_t padded = PaddedChannels(shape);
    queries.assign(std::size_t{rows} * padded, 0.0f);
    for (std::size_t i = 0; i < queries.size(); ++i) {
      if (i % padded < shape.key.channels) queries[i] = NormalNumber(random);
    }
  }

  // [rows][stride], with a larger stride than needed; the bytes in between must not change.
  std::vector<float> Score(const Operations& operations, const char** ran) const {
    const Buffer query_rows(queries.size() * sizeof(float));
    std::memcpy(query_rows.data(), queries.data(), query_rows.size());
    const std::uint64_t stride = total + 3;
    std::vector<float> scores(rows * stride, 77.0f);
    *ran = operations.score_part({.runs = runs.data(),
                                  .run_count = static_cast<std::uint32_t>(runs.size()),
                                  .rows = reinterpret_cast<const float*>(query_rows.data()),
                                  .row_count = rows,
                                  .shape = shape,
                                  .layout = LayoutOf(shape),
                                  .padded_channels = PaddedChannels(shape),
                                  .scale = kScale,
                                  .scores = scores.data(),
                                  .score_stride = stride});
    return scores;
  }

  static constexpr float kScale = 0.11f;
  TileShape shape;
  std::uint32_t rows;
  std::uint64_t total = 0;
  std::vector<std::vector<std::byte>> tiles;       // each followed by a copy of its summaries
  std::vector<std::unique_ptr<Buffer>> summaries;  // used for scoring
  std::vector<BlockRun> runs;
  std::vector<float> queries;
};

TileShape SummaryShape(TestRandom& random) {
  TileShape shape = RandomShape(random, {.dense = true});
  shape.summary = random.OneIn(2) ? Summary::kMean : Summary::kMinMax;
  shape.block = static_cast<std::uint8_t>(4u << random.Below(3));
  return shape;
}

// The live rows of a block: [begin, end) within the tile.
struct BlockRows {
  std::uint32_t begin;
  std::uint32_t end;
};
BlockRows RowsOf(const TileShape& shape, const BlockRun& run, std::uint32_t block) {
  const std::uint32_t begin = block * shape.block;
  return {begin, begin + (block + 1 == run.blocks ? run.last_entries : shape.block)};
}

double WeightAt(const TileShape& shape, const std::byte* tile, std::uint32_t row) {
  return shape.weights ? OutputElement(ElementType::kFp32, tile + LayoutOf(shape).weights, row) : 1;
}

TEST_P(PartConformance, ScoreIsTheSummarysProduct) {
  TESSERA_NEEDS(score_part);
  for (int round = 0; round < 120; ++round) {
    const ScoreCase test(reference(), SummaryShape(random_), random_);
    const TileShape& shape = test.shape;
    SCOPED_TRACE(Describe(shape));
    const bool pairs = name() == "avx512bf16" && shape.packed() &&
                       shape.summary == Summary::kMean &&
                       ValuesOf(shape.format) != ValueType::kFp16;
    const ErrorBound bound = pairs ? kCpuBf16PackedErrorBound : kCpuPackedErrorBound;
    const char* ran = nullptr;
    const std::vector<float> scores = test.Score(ops(), &ran);
    ExpectRan(ran);
    for (std::uint32_t r = 0; r < test.rows; ++r) {
      const float* query = test.queries.data() + std::size_t{r} * PaddedChannels(shape);
      const float* got = scores.data() + r * (test.total + 3);
      for (const BlockRun& run : test.runs) {
        for (std::uint32_t b = 0; b < run.blocks; ++b, ++got) {
          const std::vector<double> row =
              ReadByDefinition(shape, run.tile, Array::kBlocks, b).elements;
          double product = 0;
          double mass = 0;
          for (std::uint32_t c = 0; c < shape.key.channels; ++c) {
            const double low = query[c] * row[c];
            const double high =
                shape.summary == Summary::kMinMax ? query[c] * row[shape.key.channels + c] : low;
            product += std::max(low, high);
            mass += std::max(std::fabs(low), std::fabs(high));
          }
          double bias = -kInfinity;
          const BlockRows live = RowsOf(shape, run, b);
          for (std::uint32_t e = live.begin; e < live.end; ++e) {
            bias = std::max(bias, std::log(WeightAt(shape, run.tile, e)));
          }
          const double allowed = bound.At(ScoreCase::kScale * mass + std::fabs(bias));
          ASSERT_NEAR(*got, ScoreCase::kScale * product + bias, allowed)
              << "row " << r << " block " << b;
        }
      }
      for (int i = 0; i < 3; ++i) ASSERT_EQ(*got++, 77.0f) << "written behind a row's scores";
    }
  }
}

// Quest: the logit of an entry never exceeds its block's score.
TEST_P(PartConformance, MinMaxScoresBoundEveryEntry) {
  TESSERA_NEEDS(score_part);
  for (int round = 0; round < 80; ++round) {
    TileShape shape = SummaryShape(random_);
    shape.summary = Summary::kMinMax;
    const ScoreCase test(reference(), shape, random_);
    const char* ran = nullptr;
    const std::vector<float> scores = test.Score(ops(), &ran);
    for (std::uint32_t r = 0; r < test.rows; ++r) {
      const float* query = test.queries.data() + std::size_t{r} * PaddedChannels(shape);
      const float* score = scores.data() + r * (test.total + 3);
      for (const BlockRun& run : test.runs) {
        for (std::uint32_t b = 0; b < run.blocks; ++b, ++score) {
          const BlockRows live = RowsOf(shape, run, b);
          for (std::uint32_t e = live.begin; e < live.end; ++e) {
            const ReadTileRow key = ReadByDefinition(shape, run.tile, Array::kKeys, e);
            double logit = 0;
            double mass = 0;
            for (std::uint32_t c = 0; c < shape.key.channels; ++c) {
              logit += query[c] * key.elements[c];
              mass += std::fabs(query[c] * key.elements[c]);
            }
            logit = ScoreCase::kScale * logit + std::log(WeightAt(shape, run.tile, e));
            ASSERT_GE(*score, logit - (ScoreCase::kScale * mass + std::fabs(logit) + 1) * 0x1p-20)
                << Describe(shape) << " block " << b << " entry " << e;
          }
        }
      }
    }
  }
}

struct SelectCase {
  explicit SelectCase(TestRandom& random)
      : rows(static_cast<std::uint32_t>(random.Between(1, random.OneIn(3) ? 32 : 4))),
        stride(random.Between(1, random.OneIn(4) ? 3000 : 100)) {
    count = static_cast<std::uint32_t>(random.OneIn(2) ? stride : random.Between(1, stride));
    const std::uint64_t kind = random.Below(4);
    for (std::size_t i = 0; i < rows * stride; ++i) {
      float score = NormalNumber(random) * 3;
      if (kind == 1) score = static_cast<float>(random.Below(3));  // ties
      if (kind == 2 && random.OneIn(4)) score = -std::numeric_limits<float>::infinity();
      if (kind == 3) score = NormalNumber(random) * (random.OneIn(3) ? 0x1p100f : 1.0f);
      scores.push_back(score);
    }
    for (std::uint32_t b = 0; b < count; ++b) {
      const bool candidate = !random.OneIn(6);
      const auto entries = static_cast<std::uint8_t>(candidate ? random.Between(1, 16) : 0);
      blocks.push_back(
          {.entries = entries, .forced = static_cast<std::uint8_t>(random.OneIn(20) ? 1 : 0)});
      all += entries;
    }
    const std::uint64_t budgets[] = {0, 1, all, all + 5, random.Below(all + 1)};
    budget = random.Pick(budgets);
    values.assign(count, 0.0f);
    taken.assign(count + 1, std::uint8_t{0xaa});
  }

  const char* Select(const Operations& operations, bool by_share) {
    return operations.select({.scores = scores.data(),
                              .score_stride = stride,
                              .row_count = rows,
                              .blocks = blocks.data(),
                              .block_count = count,
                              .budget = budget,
                              .by_share = by_share,
                              .values = values.data(),
                              .taken = taken.data()});
  }

  // The maximum over rows of a candidate's score, minus the row's log-sum-exp if by_share.
  std::vector<double> ExactValues(bool by_share) const {
    std::vector<double> exact(count, -kInfinity);
    for (std::uint32_t r = 0; r < rows; ++r) {
      const float* row = scores.data() + r * stride;
      double max = -kInfinity;
      double sum = 0;
      for (std::uint32_t b = 0; b < count; ++b) {
        if (blocks[b].entries != 0) max = std::max<double>(max, row[b]);
      }
      for (std::uint32_t b = 0; b < count; ++b) {
        if (blocks[b].entries != 0 && max > -kInfinity) sum += std::exp(row[b] - max);
      }
      const double less = by_share && max > -kInfinity ? max + std::log(sum) : 0;
      for (std::uint32_t b = 0; b < count; ++b) exact[b] = std::max(exact[b], row[b] - less);
    }
    return exact;
  }

  std::uint32_t rows;
  std::uint64_t stride;
  std::uint32_t count = 0;
  std::uint64_t all = 0;
  std::uint64_t budget = 0;
  std::vector<float> scores;
  std::vector<BlockFacts> blocks;
  std::vector<float> values;
  std::vector<std::uint8_t> taken;
};

// Selection by score involves no rounding: compared with an exhaustive choice, block by block.
TEST_P(PartConformance, SelectByScoreTakesTheBest) {
  TESSERA_NEEDS(select);
  for (int round = 0; round < 300; ++round) {
    SelectCase test(random_);
    ExpectRan(test.Select(ops(), false));
    const std::vector<double> exact = test.ExactValues(false);
    std::vector<std::uint8_t> expected(test.count, 0);
    std::uint64_t entries = 0;
    for (std::uint32_t b = 0; b < test.count; ++b) {
      if (test.blocks[b].forced == 0 || test.blocks[b].entries == 0) continue;
      expected[b] = 1;
      entries += test.blocks[b].entries;
    }
    while (entries < test.budget) {
      std::uint32_t best = test.count;
      for (std::uint32_t b = 0; b < test.count; ++b) {
        if (expected[b] != 0 || test.blocks[b].entries == 0) continue;
        if (best == test.count || exact[b] > exact[best]) best = b;
      }
      if (best == test.count) break;
      expected[best] = 1;
      entries += test.blocks[best].entries;
    }
    for (std::uint32_t b = 0; b < test.count; ++b) {
      ASSERT_EQ(test.taken[b], expected[b]) << "block " << b << " of " << test.count << " budget "
                                            << test.budget << " rows " << test.rows;
    }
    ASSERT_EQ(test.taken[test.count], 0xaa) << "written behind the last block";
  }
}

// By share the log-sum-exp is rounded, so the choice is checked by its values.
TEST_P(PartConformance, SelectByShareTakesTheBest) {
  TESSERA_NEEDS(select);
  for (int round = 0; round < 300; ++round) {
    SelectCase test(random_);
    ExpectRan(test.Select(ops(), true));
    const std::vector<double> exact = test.ExactValues(true);
    double weakest_taken = kInfinity;
    double strongest_left = -kInfinity;
    std::uint64_t entries = 0;
    std::uint64_t forced = 0;
    std::uint8_t largest = 0;
    for (std::uint32_t b = 0; b < test.count; ++b) {
      const BlockFacts& facts = test.blocks[b];
      ASSERT_LE(test.taken[b], 1);
      if (facts.entries == 0) {
        ASSERT_EQ(test.taken[b], 0) << "no candidate";
        continue;
      }
      if (facts.forced != 0) {
        ASSERT_EQ(test.taken[b], 1) << "forced";
        forced += facts.entries;
      } else if (test.taken[b] != 0) {
        weakest_taken = std::min(weakest_taken, exact[b]);
        largest = std::max(largest, facts.entries);
      } else {
        strongest_left = std::max(strongest_left, exact[b]);
      }
      if (test.taken[b] != 0) entries += facts.entries;
    }
    if (strongest_left > -kInfinity) {
      ASSERT_GE(weakest_taken, strongest_left - (1 + std::fabs(strongest_left)) * 0x1p-16);
    }
    ASSERT_GE(entries, std::min(test.budget, test.all));
    ASSERT_LT(entries, std::max(test.budget, forced) + std::max<std::uint64_t>(largest, 1));
  }
}

// Queries from workers, and so scores, may be infinite or NaN. A selection that exceeds its budget
// by more than a block would overrun memory sized from the budget. A NaN score has no
// meaning.
TEST_P(PartConformance, SelectKeepsItsBudgetWhateverTheScoresAre) {
  TESSERA_NEEDS(select);
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kMost = std::numeric_limits<float>::infinity();
  constexpr float kScores[] = {kNan, -kNan, kMost, -kMost, 0.0f, -0.0f, 3e38f, -1.5f};
  for (int round = 0; round < 300; ++round) {
    SelectCase test(random_);
    for (std::size_t i = 0; i < test.scores.size();) {  // in runs: the order matters to a search
      const float score = random_.Pick(kScores);
      for (std::uint64_t left = random_.Between(1, random_.OneIn(2) ? 20 : 1500);
           left > 0 && i < test.scores.size(); --left) {
        test.scores[i++] = score;
      }
    }
    const bool by_share = random_.OneIn(2);
    SelectCase expected = test;
    ExpectRan(test.Select(ops(), by_share));
    std::uint64_t entries = 0;
    std::uint64_t forced = 0;
    for (std::uint32_t b = 0; b < test.count; ++b) {
      if (test.blocks[b].forced != 0) forced += test.blocks[b].entries;
      if (test.taken[b] != 0) entries += test.blocks[b].entries;
    }
    ASSERT_GE(entries, std::min(test.budget, test.all));
    ASSERT_LT(entries, std::max(test.budget, forced) + 16);
    if (by_share) continue;
    expected.Select(reference(), false);
    ASSERT_EQ(test.taken, expected.taken);
  }
}

}  // namespace
}  // namespace tessera::kernels
