// The yardstick in fp8: how far its rows are from the exact ones, and that reading tokens one by
// one and all at once is the same.

#include "client/eval/text/fp8_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "kernels/format/element.h"
#include "tests/fakes/seed.h"

namespace tessera::cli::eval {
namespace {

using Rows = std::vector<std::uint16_t>;

class Yardstick : public testing::Test {
 protected:
  // Lanes whose rows have different sizes.
  Rows Draw(std::size_t tokens, std::uint32_t row) {
    Rows rows(tokens * row);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const float size = i % config_.kv_row() < config_.head_dim ? 0.01f : 300.0f;
      rows[i] = kernels::FloatToBf16(size * (random_.Below(20001) / 10000.0f - 1));
    }
    return rows;
  }
  PromptRows Prompt(std::size_t tokens) {
    PromptRows prompt(config_);
    std::vector<float> output(tokens * config_.query_row());
    for (std::uint32_t layer = 0; layer < config_.layers; ++layer) {
      const Rows key = Draw(tokens, config_.kv_row()), value = Draw(tokens, config_.kv_row());
      const Rows query = Draw(tokens, config_.query_row());
      EXPECT_TRUE(
          prompt.Attend({.layer = layer, .key = key, .value = value, .query = query}, output).ok());
    }
    return prompt;
  }

  TestRandom random_;
  const llm::Config config_ = {.layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 64};
};

// e4m3 has 3 bits after the first: half a unit is 1/16 of a power of two, or 2^-10 of a lane's
// scale where it is subnormal. The product with the scale is rounded to bf16.
TEST_F(Yardstick, RoundsToTheNearestOfALanesScale) {
  const PromptRows prompt = Prompt(70);
  const Fp8Cache cache(config_, prompt);
  for (std::uint32_t layer = 0; layer < config_.layers; ++layer) {
    for (const bool value : {false, true}) {
      const auto exact = value ? prompt.value(layer) : prompt.key(layer);
      const auto rounded = value ? cache.value(layer) : cache.key(layer);
      ASSERT_EQ(rounded.size(), exact.size());
      std::vector<float> peaks(config_.kv_heads);
      for (std::size_t i = 0; i < exact.size(); ++i) {
        float& peak = peaks[i % config_.kv_row() / config_.head_dim];
        peak = std::max(peak, std::abs(kernels::Bf16ToFloat(exact[i])));
      }
      int changed = 0;
      for (std::size_t i = 0; i < exact.size(); ++i) {
        const float was = kernels::Bf16ToFloat(exact[i]), is = kernels::Bf16ToFloat(rounded[i]);
        const float scale = peaks[i % config_.kv_row() / config_.head_dim] / 448;
        EXPECT_LE(std::abs(is - was),
                  std::max(std::abs(was) / 16, scale / 1024) + std::abs(was) / 250)
            << was << " became " << is;
        changed += is != was ? 1 : 0;
      }
      EXPECT_GT(changed, static_cast<int>(exact.size()) / 2);
    }
  }
  EXPECT_NEAR(cache.bytes_kept(), 0.5, 0.001);
}

TEST_F(Yardstick, ReadsTokensOneByOneAsItReadsThemAtOnce) {
  const PromptRows prompt = Prompt(40);
  Fp8Cache at_once(config_, prompt), one_by_one(config_, prompt);
  constexpr std::size_t kTokens = 5;
  const Rows key = Draw(kTokens, config_.kv_row()), value = Draw(kTokens, config_.kv_row());
  const Rows query = Draw(kTokens, config_.query_row());
  std::vector<float> all(query.size());
  ASSERT_TRUE(at_once.Attend({.key = key, .value = value, .query = query}, all).ok());
  for (std::size_t token = 0; token < kTokens; ++token) {
    const auto of = [token](const Rows& rows) {
      return std::span(rows).subspan(token * rows.size() / kTokens, rows.size() / kTokens);
    };
    std::vector<float> one(config_.query_row());
    ASSERT_TRUE(
        one_by_one.Attend({.key = of(key), .value = of(value), .query = of(query)}, one).ok());
    for (std::size_t i = 0; i < one.size(); ++i) {
      EXPECT_NEAR(one[i], all[token * one.size() + i], 1e-3 * 300) << token;
    }
  }
}

TEST_F(Yardstick, ClampsLaterRowsToThePromptsScale) {
  const PromptRows prompt = Prompt(8);
  Fp8Cache cache(config_, prompt);
  const Rows large(config_.kv_row(), kernels::FloatToBf16(1e6f));
  const Rows query(config_.query_row());
  std::vector<float> output(query.size());
  ASSERT_TRUE(cache.Attend({.key = large, .value = large, .query = query}, output).ok());
  const float peak = std::abs(
      kernels::Bf16ToFloat(*std::ranges::max_element(prompt.value(0), {}, [](std::uint16_t bits) {
        return std::abs(kernels::Bf16ToFloat(bits));
      })));
  EXPECT_NEAR(kernels::Bf16ToFloat(cache.value(0).back()), peak, 0.01 * peak);
}

}  // namespace
}  // namespace tessera::cli::eval
