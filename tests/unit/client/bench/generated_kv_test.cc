#include "client/bench/workload/generated_kv.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "client/bench/measure/attention_judge.h"
#include "client/bench/workload/kept_rows.h"
#include "gtest/gtest.h"
#include "kernels/strategy/eigen.h"
#include "tests/fakes/seed.h"

namespace tessera::cli::bench {
namespace {

GeneratedShape SmallShape(TestRandom& random) {
  GeneratedShape shape;
  shape.head_dim = random.OneIn(2) ? 64 : 128;
  shape.tokens = random.OneIn(2) ? 2048 : 3072;
  return shape;
}

bool SameBytes(const kernels::RowSpan& a, const kernels::RowSpan& b) {
  return a.count == b.count && std::memcmp(a.data, b.data, a.count * a.row_bytes()) == 0;
}

TEST(GeneratedKv, IsTheSameForASeedAndNoOther) {
  TestRandom random;
  const GeneratedShape shape = SmallShape(random);
  const std::uint64_t seed = random.Bits();
  const GeneratedKv once(shape, seed);
  const GeneratedKv again(shape, seed);
  const GeneratedKv other(shape, seed + 1);
  for (std::uint32_t h = 0; h < shape.kv_heads; ++h) {
    EXPECT_TRUE(SameBytes(once.Rows(h).keys, again.Rows(h).keys));
    EXPECT_TRUE(SameBytes(once.Rows(h).values, again.Rows(h).values));
    EXPECT_FALSE(SameBytes(once.Rows(h).keys, other.Rows(h).keys));
    EXPECT_FALSE(SameBytes(once.Rows(h).values, other.Rows(h).values));
    EXPECT_EQ(once.Query(h, 1, 3).row, again.Query(h, 1, 3).row);
    EXPECT_NE(once.Query(h, 1, 3).row, once.Query(h, 1, 4).row);
    EXPECT_NE(once.Query(h, 1, 3).row, once.Query(h, 0, 3).row);
  }
  EXPECT_FALSE(SameBytes(once.Rows(0).keys, once.Rows(1).keys));
}

TEST(GeneratedKv, HeadsDoNotDependOnHowManyThereAre) {
  TestRandom random;
  GeneratedShape shape = SmallShape(random);
  shape.kv_heads = 1;
  const std::uint64_t seed = random.Bits();
  const GeneratedKv one(shape, seed);
  shape.kv_heads = 3;
  const GeneratedKv three(shape, seed);
  EXPECT_TRUE(SameBytes(one.Rows(0).keys, three.Rows(0).keys));
  EXPECT_EQ(one.Query(0, 2, 5).row, three.Query(0, 2, 5).row);
}

// The exponent by which the measured second moments decay: a line through their logarithms, without
// both ends, where a sample deviates most.
double MeasuredExponent(const kernels::RowSpan& rows) {
  kernels::Moments moments(rows.head_dim);
  moments.Add(rows, BenchOperations());
  const kernels::Eigenbasis basis = kernels::Decompose(moments);
  double n = 0;
  double x = 0;
  double y = 0;
  double xx = 0;
  double xy = 0;
  for (std::uint32_t i = 2; i < rows.head_dim * 3 / 4; ++i) {
    const double log_index = std::log(i + 1.0);
    const double log_value = std::log(basis.values[i]);
    n += 1;
    x += log_index;
    y += log_value;
    xx += log_index * log_index;
    xy += log_index * log_value;
  }
  return -(n * xy - x * y) / (n * xx - x * x);
}

TEST(GeneratedKv, HasTheSpectrumThatWasAskedFor) {
  TestRandom random;
  GeneratedShape shape = SmallShape(random);
  shape.tokens = 8192;
  shape = ContentOnly(shape);
  shape.key_exponent = 0.4 + static_cast<double>(random.Below(5)) / 10;
  shape.value_exponent = 0.2 + static_cast<double>(random.Below(5)) / 10;
  const GeneratedKv kv(shape, random.Bits());
  for (std::uint32_t h = 0; h < shape.kv_heads; ++h) {
    EXPECT_NEAR(MeasuredExponent(kv.Rows(h).keys), shape.key_exponent, 0.12);
    EXPECT_NEAR(MeasuredExponent(kv.Rows(h).values), shape.value_exponent, 0.12);
  }
}

TEST(GeneratedKv, LargeChannelsAreLargeInEveryKey) {
  TestRandom random;
  GeneratedShape shape = ContentOnly(SmallShape(random));
  shape.large_channels = 1;
  const GeneratedKv kv(shape, random.Bits());
  const FloatLane lane = Widen(kv.Rows(0));
  std::vector<double> sums(shape.head_dim);
  for (std::uint32_t t = 0; t < shape.tokens; ++t) {
    for (std::uint32_t d = 0; d < shape.head_dim; ++d) {
      sums[d] += lane.keys[std::size_t{t} * shape.head_dim + d];
    }
  }
  std::vector<double> sizes;
  for (const double sum : sums) sizes.push_back(std::fabs(sum) / shape.tokens);
  std::sort(sizes.begin(), sizes.end());
  EXPECT_NEAR(sizes.back(), shape.large_size, 0.8);
  EXPECT_LT(sizes[sizes.size() - 2], 0.8);
}

// The share of pairs of chunks that are equal, token by token.
double RepeatedPairs(const GeneratedShape& shape, std::uint64_t seed) {
  const GeneratedKv kv(shape, seed);
  const FloatLane lane = Widen(kv.Rows(0));
  const auto cosine = [&](std::uint32_t a, std::uint32_t b) {
    double dot = 0;
    double squares[2] = {};
    for (std::uint32_t d = 0; d < shape.head_dim; ++d) {
      const double x = lane.values[std::size_t{a} * shape.head_dim + d];
      const double y = lane.values[std::size_t{b} * shape.head_dim + d];
      dot += x * y;
      squares[0] += x * x;
      squares[1] += y * y;
    }
    return dot / std::sqrt(squares[0] * squares[1]);
  };
  double pairs = 0;
  double alike = 0;
  for (std::uint32_t a = 0; a < shape.tokens; a += shape.chunk_tokens) {
    for (std::uint32_t b = 0; b < a; b += shape.chunk_tokens) {
      double mean = 0;
      for (std::uint32_t i = 0; i < shape.chunk_tokens; ++i) mean += cosine(a + i, b + i);
      ++pairs;
      if (mean / shape.chunk_tokens > 0.5) ++alike;
    }
  }
  return alike / pairs;
}

// Zipf's law over n types makes two chunks equal with probability sum 1/i^2 / (sum 1/i)^2: 4.4 %
// for 256.
TEST(GeneratedKv, SomeChunksComeAgainAndAgain) {
  TestRandom random;
  GeneratedShape shape;
  shape.kv_heads = 1;
  shape.head_dim = 64;
  shape.tokens = 2048;
  const std::uint64_t seed = random.Bits();
  const double zipf = RepeatedPairs(shape, seed);
  EXPECT_GT(zipf, 0.02);
  EXPECT_LT(zipf, 0.1);
  shape.zipf_exponent = 0;
  EXPECT_LT(RepeatedPairs(shape, seed), 0.01);
}

double MassOf(const std::vector<std::uint32_t>& tokens, const Attention& attention) {
  double mass = 0;
  for (const std::uint32_t t : tokens) mass += attention.weights[t];
  return mass;
}

// Exact attention gives the sought token its share, and the sinks theirs. A query for a needle
// gives no other token more, except the sinks. With few dimensions a needle resembles other tokens
// too much.
TEST(GeneratedKv, QueriesFindWhatTheySeek) {
  TestRandom random;
  int queries[4] = {};
  int found[4] = {};
  int best_found = 0;
  for (int instance = 0; instance < 3; ++instance) {
    const GeneratedShape shape = SmallShape(random);
    const GeneratedKv kv(shape, random.Bits());
    std::vector<std::uint32_t> sinks(shape.sinks);
    std::iota(sinks.begin(), sinks.end(), 0);
    const FloatLane lanes[] = {Widen(kv.Rows(0)), Widen(kv.Rows(1))};
    for (std::uint32_t i = 0; i < 20 * shape.kv_heads * shape.group; ++i) {
      const std::uint32_t h = i % shape.kv_heads;
      const GeneratedQuery query = kv.Query(h, i / 2 % shape.group, i);
      const Attention attention = Attend(query.row, lanes[h]);
      const auto kind = static_cast<int>(query.seeks);
      const bool nothing = query.seeks == Seeks::kNothing;
      EXPECT_EQ(query.sought.empty(), nothing);
      ++queries[kind];
      if (std::fabs(MassOf(sinks, attention) - shape.sink_mass) > 0.1) continue;
      if (!nothing && std::fabs(MassOf(query.sought, attention) - shape.sought_mass) > 0.1) {
        continue;
      }
      ++found[kind];
      const auto best =
          std::max_element(attention.weights.begin() + shape.sinks, attention.weights.end());
      const auto token = static_cast<std::uint32_t>(best - attention.weights.begin());
      if (query.seeks == Seeks::kNeedle &&
          std::binary_search(query.sought.begin(), query.sought.end(), token)) {
        ++best_found;
      }
    }
  }
  for (int kind = 0; kind < 4; ++kind) {
    EXPECT_GT(queries[kind], 50) << kind;
    EXPECT_GT(found[kind], 0.6 * queries[kind]) << kind;
  }
  EXPECT_GT(best_found, 0.6 * queries[static_cast<int>(Seeks::kNeedle)]);
}

// Loss on a stretch's odd tiles with a strategy made from the even tiles of another stretch.
kernels::Loss LossBetween(const kernels::LaneRows& made_from, const kernels::LaneRows& judged) {
  const EveryOtherTile even(made_from, false);
  const EveryOtherTile odd(judged, true);
  const kernels::Strategy strategy = StrategyFor(even.rows(), FixedOptions(0.25, 1));
  return kernels::LossUnder(odd.rows(), strategy.shape, strategy.view(), BenchOperations());
}

// By how much a rotation from the first half loses more on the second half than the second half's
// own rotation.
kernels::Loss LossRatio(const GeneratedShape& shape, std::uint64_t seed) {
  const GeneratedKv kv(shape, seed);
  const kernels::LaneRows first = kv.Rows(0, 0, shape.tokens / 2);
  const kernels::LaneRows second = kv.Rows(0, shape.tokens / 2, shape.tokens / 2);
  const kernels::Loss within = LossBetween(second, second);
  const kernels::Loss across = LossBetween(first, second);
  return {.key = across.key / within.key, .value = across.value / within.value};
}

TEST(GeneratedKv, RegionsDriftApart) {
  TestRandom random;
  GeneratedShape shape;
  shape.kv_heads = 1;
  shape.tokens = 4096;
  shape.exponent_spread = 0;
  const std::uint64_t seed = random.Bits();
  const kernels::Loss still = LossRatio(shape, seed);
  shape.regions = 2;
  const kernels::Loss drifting = LossRatio(shape, seed);
  EXPECT_GT(drifting.key, 1.1);
  EXPECT_GT(drifting.value, 1.1);
  EXPECT_GT(drifting.key, still.key);
  EXPECT_GT(drifting.value, still.value);
}

}  // namespace
}  // namespace tessera::cli::bench
