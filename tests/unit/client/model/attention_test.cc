// The worker's own attention, compared with the definition in double precision.

#include "client/model/attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/format/element.h"
#include "tests/fakes/seed.h"

namespace tessera::llm {
namespace {

using kernels::Bf16ToFloat;

std::vector<std::uint16_t> Rows(TestRandom& random, std::size_t count) {
  std::vector<std::uint16_t> rows(count);
  for (std::uint16_t& bits : rows) {
    bits = kernels::FloatToBf16(static_cast<float>(random.Below(2001)) / 500 - 2);
  }
  return rows;
}

// The output of query `row` of `head`, over the tokens up to its own.
std::vector<double> Truth(const Config& config, const LayerRows& rows, std::size_t row,
                          std::size_t head) {
  const std::size_t dim = config.head_dim;
  const std::size_t tokens = rows.key.size() / config.kv_row();
  const std::size_t queries = rows.query.size() / config.query_row();
  const std::size_t lane = head / (config.query_heads / config.kv_heads) * dim;
  const std::size_t seen = tokens - queries + row + 1;
  std::vector<double> weights;
  for (std::size_t token = 0; token < seen; ++token) {
    double dot = 0;
    for (std::size_t i = 0; i < dim; ++i) {
      dot +=
          static_cast<double>(Bf16ToFloat(rows.query[row * config.query_row() + head * dim + i])) *
          Bf16ToFloat(rows.key[token * config.kv_row() + lane + i]);
    }
    weights.push_back(std::exp(dot / std::sqrt(static_cast<double>(dim))));
  }
  double sum = 0;
  for (const double weight : weights) sum += weight;
  std::vector<double> output(dim);
  for (std::size_t token = 0; token < seen; ++token) {
    for (std::size_t i = 0; i < dim; ++i) {
      output[i] +=
          weights[token] / sum * Bf16ToFloat(rows.value[token * config.kv_row() + lane + i]);
    }
  }
  return output;
}

TEST(Attention, IsCausalSoftmaxOverTheGroupsKeys) {
  TestRandom random;
  for (int round = 0; round < 20; ++round) {
    Config config;
    config.layers = 1;
    config.head_dim = 2 * static_cast<std::uint32_t>(random.Between(1, 40));
    config.kv_heads = static_cast<std::uint32_t>(random.Between(1, 3));
    config.query_heads = config.kv_heads * static_cast<std::uint32_t>(random.Between(1, 3));
    const std::size_t tokens = random.Between(1, 150), queries = random.Between(1, tokens);
    const auto key = Rows(random, tokens * config.kv_row());
    const auto value = Rows(random, tokens * config.kv_row());
    const auto query = Rows(random, queries * config.query_row());
    const LayerRows rows = {.key = key, .value = value, .query = query};
    std::vector<float> output(query.size());
    AttendDense(config, rows, output);
    for (std::size_t row = 0; row < queries; ++row) {
      for (std::size_t head = 0; head < config.query_heads; ++head) {
        const std::vector<double> truth = Truth(config, rows, row, head);
        for (std::size_t i = 0; i < config.head_dim; ++i) {
          ASSERT_NEAR(output[row * config.query_row() + head * config.head_dim + i], truth[i],
                      1e-4);
        }
      }
    }
  }
}

// A cache filled piece by piece gives the same as one pass over everything.
TEST(Attention, OwnAttentionRemembers) {
  TestRandom random;
  Config config;
  config.layers = 2;
  config.head_dim = 16;
  config.kv_heads = 2;
  config.query_heads = 4;
  const std::size_t tokens = 60;
  const auto key = Rows(random, tokens * config.kv_row());
  const auto value = Rows(random, tokens * config.kv_row());
  const auto query = Rows(random, tokens * config.query_row());
  std::vector<float> whole(query.size()), pieces(query.size());
  AttendDense(config, {.key = key, .value = value, .query = query}, whole);
  LocalAttention own(config);
  for (std::size_t first = 0; first < tokens;) {
    const std::size_t count = std::min<std::size_t>(random.Between(1, 20), tokens - first);
    const std::size_t kv = config.kv_row(), q = config.query_row();
    for (std::uint32_t layer = 0; layer < 2; ++layer) {
      const LayerRows rows = {.layer = layer,
                              .key = std::span(key).subspan(first * kv, count * kv),
                              .value = std::span(value).subspan(first * kv, count * kv),
                              .query = std::span(query).subspan(first * q, count * q)};
      ASSERT_TRUE(own.Attend(rows, std::span(pieces).subspan(first * q, count * q)).ok());
    }
    first += count;
  }
  for (std::size_t i = 0; i < whole.size(); ++i) ASSERT_NEAR(whole[i], pieces[i], 1e-5);
}

}  // namespace
}  // namespace tessera::llm
