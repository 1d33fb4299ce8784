#include "client/model/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tests/fakes/seed.h"

namespace tessera::llm {
namespace {

TEST(Sampler, GreedyTakesTheLowestOfEquals) {
  const std::vector<float> logits = {0, 3, -1, 3};
  EXPECT_EQ(Sampler({}).Choose(logits), 1u);
  EXPECT_EQ(Sampler({.temperature = 2, .top_k = 1}).Choose(logits), 1u);
}

TEST(Sampler, TokensComeAsOftenAsSoftmaxSays) {
  TestRandom random;
  const std::vector<float> logits = {0.0f, 1.0f, -0.5f, 2.0f, 0.3f};
  const double temperature = 1.5;
  for (const std::uint32_t top_k : {0u, 3u}) {
    std::vector<double> wanted(logits.size());
    double sum = 0;
    for (std::size_t i = 0; i < logits.size(); ++i) {
      if (top_k == 3 && logits[i] < 0.3f) continue;  // 2.0, 1.0 and 0.3 are the most likely
      sum += wanted[i] = std::exp(logits[i] / temperature);
    }
    Sampler sampler({.temperature = temperature, .top_k = top_k, .seed = random.Bits()});
    constexpr int kDraws = 40000;
    std::vector<int> counts(logits.size());
    for (int i = 0; i < kDraws; ++i) ++counts[sampler.Choose(logits)];
    for (std::size_t i = 0; i < logits.size(); ++i) {
      // Six standard deviations of a count.
      const double share = wanted[i] / sum;
      EXPECT_NEAR(counts[i], kDraws * share, 6 * std::sqrt(kDraws * share * (1 - share))) << i;
    }
  }
}

TEST(Sampler, TheSameSeedChoosesTheSame) {
  const std::vector<float> logits(100, 1.0f);
  Sampler a({.temperature = 1, .seed = 7}), b({.temperature = 1, .seed = 7});
  bool differs = false;
  Sampler other({.temperature = 1, .seed = 8});
  for (int i = 0; i < 100; ++i) {
    const TokenId chosen = a.Choose(logits);
    EXPECT_EQ(chosen, b.Choose(logits));
    differs |= chosen != other.Choose(logits);
  }
  EXPECT_TRUE(differs);
}

}  // namespace
}  // namespace tessera::llm
