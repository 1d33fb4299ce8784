// Spans of tokens that arrived as prompts, and where choices end because of them.
#include "daemon/compaction/jobs/prompt_spans.h"

#include <gmock/gmock.h>

#include <vector>

#include "daemon/compaction/lanes/layer_choice.h"
#include "tests/fakes/seed.h"

namespace tessera::compaction {
namespace {

// As a list of booleans per token.
std::vector<policies::TokenSpan> RunsOf(const std::vector<bool>& tokens) {
  std::vector<policies::TokenSpan> runs;
  for (std::uint64_t t = 0; t < tokens.size(); ++t) {
    if (!tokens[t]) continue;
    if (t == 0 || !tokens[t - 1]) runs.push_back({.begin = t, .end = t});
    runs.back().end = t + 1;
  }
  return runs;
}

TEST(PromptSpans, AreRunsOfTokens) {
  TestRandom random;
  for (int round = 0; round < 200; ++round) {
    PromptSpans spans;
    std::vector<bool> tokens(60);
    for (int step = 0; step < 12; ++step) {
      const std::uint64_t begin = random.Below(60);
      if (random.OneIn(5)) {
        spans.CutTo(begin);
        std::fill(tokens.begin() + static_cast<std::ptrdiff_t>(begin), tokens.end(), false);
      } else {
        const std::uint64_t end = random.Between(begin, 60);
        spans.Add(begin, end);
        std::fill(tokens.begin() + static_cast<std::ptrdiff_t>(begin),
                  tokens.begin() + static_cast<std::ptrdiff_t>(end), true);
      }
      ASSERT_EQ(spans.spans(), RunsOf(tokens));
    }
  }
}

// Before a prompt, at its end, and after every 32 tokens that were decoded since.
TEST(PromptSpans, ChoicesStopAtThemAndAtWholeTilesBetween) {
  TestRandom random;
  for (int round = 0; round < 200; ++round) {
    std::vector<bool> tokens(400);
    PromptSpans spans;
    for (std::uint64_t prompts = random.Below(4); prompts > 0; --prompts) {
      const std::uint64_t begin = random.Below(300);
      const std::uint64_t end = random.Between(begin, 300);
      spans.Add(begin, end);
      std::fill(tokens.begin() + static_cast<std::ptrdiff_t>(begin),
                tokens.begin() + static_cast<std::ptrdiff_t>(end), true);
    }
    std::vector<bool> stops(tokens.size() + 1);
    std::uint64_t decoded = 0;
    for (std::size_t t = 1; t <= tokens.size(); ++t) {
      const bool next = t < tokens.size() && tokens[t];
      decoded = tokens[t - 1] ? 0 : decoded + 1;
      stops[t] = tokens[t - 1] != next || (decoded > 0 && decoded % 32 == 0);
    }
    for (std::uint64_t decided = 0; decided + 33 < tokens.size(); ++decided) {
      std::uint64_t expected = decided + 1;
      while (!stops[expected]) ++expected;
      ASSERT_EQ(StopAfter(spans.spans(), decided), expected) << "after " << decided;
    }
  }
}

}  // namespace
}  // namespace tessera::compaction
