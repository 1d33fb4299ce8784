// Spans of tokens that arrived as prompts.
#include "daemon/compaction/jobs/prompt_spans.h"

#include <gmock/gmock.h>

#include <vector>

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

}  // namespace
}  // namespace tessera::compaction
