// Policies that continue while decoding, compared with simulations of one token after another.
#include <numeric>

#include "daemon/base/strings.h"
#include "daemon/policies/grammar/validate.h"
#include "kernels/tokens/ladder.h"
#include "tests/unit/policies/decide.h"

namespace tessera::policies {
namespace {

using Positions = std::vector<std::uint64_t>;

// A prompt, then one or several tokens at a time.
struct Session {
  ObservedLayer layer;
  Policy policy;
  LayerMemory memory = {};

  Session(const ObservedLayerOptions& form, std::string_view text, TestRandom& random)
      : layer(form, ExactOperations(), random), policy(Parsed(text)) {}

  void Prompt(std::uint64_t tokens) {
    layer.Grow(tokens);
    const auto decision = Decide(policy, layer.Show(NeedsOf(policy), layer.tokens()), memory);
    ASSERT_TRUE(decision.ok()) << decision.status();
    layer.Apply(*decision);
  }
  // Forward steps with these numbers of tokens.
  void Came(const std::vector<std::uint64_t>& steps) {
    std::vector<std::uint64_t> held;
    for (const auto& lane : layer.lanes()) held.push_back(lane.size());
    const std::uint64_t first = layer.tokens();
    std::vector<TokenSpan> prompts;
    for (const std::uint64_t tokens : steps) {
      if (tokens > 1) prompts.push_back({layer.tokens(), layer.tokens() + tokens});
      layer.Grow(tokens);
    }
    LayerView view = layer.Show(NeedsOf(policy), first);
    view.prompts = prompts;
    const auto decision = Advance(policy, view, held, memory);
    ASSERT_TRUE(decision.ok()) << decision.status();
    layer.Apply(*decision);
  }
  void Decoded(std::uint64_t tokens) { Came(std::vector<std::uint64_t>(tokens, 1)); }
  // The positions in each lane.
  std::vector<Positions> Held() {
    std::vector<Positions> held;
    for (const auto& lane : layer.lanes()) {
      held.emplace_back();
      for (const auto& entry : lane) held.back().push_back(entry.position);
    }
    return held;
  }
};

Positions FirstPositions(std::uint64_t count) {
  Positions positions(count);
  std::iota(positions.begin(), positions.end(), std::uint64_t{0});
  return positions;
}

// Mostly single tokens, sometimes a prompt.
std::vector<std::uint64_t> RandomSteps(TestRandom& random) {
  std::vector<std::uint64_t> steps(random.Between(1, 4), 1);
  for (std::uint64_t& tokens : steps) {
    if (random.OneIn(4)) tokens = random.Between(2, 40);
  }
  return steps;
}

TEST(DecideContinuing, StreamingKeepsTheFirstAndTheNewest) {
  TestRandom random;
  for (int round = 0; round < 20; ++round) {
    const std::uint64_t sink = random.Below(6);
    const std::uint64_t recent = random.Between(1, 20);
    Session run(RandomForm(random),
                random.OneIn(2) ? Concat("streaming:sink=", sink, ",recent=", recent)
                                : Concat("streaming:sink=", sink, ",budget=", sink + recent),
                random);
    run.Prompt(random.Between(1, 60));
    for (int step = 0; step < 10; ++step) {
      for (const Positions& lane : run.Held()) {
        const std::uint64_t tokens = run.layer.tokens();
        Positions expected;
        for (std::uint64_t t = 0; t < tokens; ++t) {
          if (t < sink || t + recent >= tokens) expected.push_back(t);
        }
        EXPECT_EQ(lane, expected);
      }
      run.Decoded(random.Between(1, 5));
    }
  }
}

// Entries of one lane by position, and the attention paid to them.
struct ReferenceHeavyHitters {
  Positions held;
  std::vector<double> paid;

  void Evict(std::uint64_t heavy, std::uint64_t recent) {
    while (held.size() > heavy + recent) {
      std::size_t worst = 0;
      for (std::size_t i = 0; i + recent < held.size(); ++i) {
        if (paid[i] <= paid[worst]) worst = i;  // of equal ones the younger is evicted
      }
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(worst));
      paid.erase(paid.begin() + static_cast<std::ptrdiff_t>(worst));
    }
  }
  // Adds the attention of token `query`, which arrives with it.
  void Pay(const ObservedLayer& layer, std::size_t lane, std::uint64_t query) {
    held.push_back(query);
    paid.push_back(0);
    for (std::uint32_t i = 0; i < layer.group(); ++i) {
      const auto head = static_cast<std::uint32_t>(lane) * layer.group() + i;
      const std::vector<double> shares = layer.SharesOfOriginalKeys(head, query, held);
      for (std::size_t e = 0; e < shares.size(); ++e) paid[e] += shares[e] / layer.group();
    }
  }
};

TEST(DecideContinuing, H2oIsItsDefinition) {
  TestRandom random;
  for (int round = 0; round < 15; ++round) {
    const std::uint64_t heavy = random.Between(1, 12);
    const std::uint64_t recent = random.Between(1, 12);
    const ObservedLayerOptions form = RandomForm(random);
    Session run(form, Concat("h2o:heavy=", heavy, ",recent=", recent), random);
    const std::uint64_t prompt = random.Between(1, 50);
    run.layer.Grow(prompt);
    std::vector<ReferenceHeavyHitters> plain(form.kv_heads);
    for (std::size_t lane = 0; lane < plain.size(); ++lane) {
      plain[lane].held = FirstPositions(prompt);
      for (const float sum : run.layer.Sums(lane, 0)) plain[lane].paid.push_back(sum);
      plain[lane].Evict(heavy, recent);
    }
    run.Prompt(0);
    for (int step = 0; step < 12; ++step) {
      for (std::size_t lane = 0; lane < plain.size(); ++lane) {
        ASSERT_EQ(run.Held()[lane], plain[lane].held);
      }
      const std::uint64_t first = run.layer.tokens();
      const std::vector<std::uint64_t> steps = RandomSteps(random);
      run.Came(steps);
      for (std::size_t lane = 0; lane < plain.size(); ++lane) {
        std::uint64_t query = first;
        for (const std::uint64_t tokens : steps) {
          for (std::uint64_t i = 0; i < tokens; ++i) plain[lane].Pay(run.layer, lane, query++);
          plain[lane].Evict(heavy, recent);
        }
      }
    }
  }
}

// Attention paid to a prompt's keys also counts in the next prompt.
TEST(DecideContinuing, H2oRemembersFromPromptToPrompt) {
  TestRandom random;
  Session run({.query_heads = 1, .kv_heads = 1}, "h2o:heavy=2,recent=2", random);
  run.Prompt(4);
  ASSERT_EQ(run.memory.scores[0].size(), 4u);
  run.memory.scores[0] = {0, 100, 0, 50};
  run.Prompt(6);
  EXPECT_EQ(run.Held()[0], (Positions{1, 3, 8, 9}));
  EXPECT_GT(run.memory.scores[0][0], 100);
}

TEST(DecideContinuing, TovaIsItsDefinition) {
  TestRandom random;
  for (int round = 0; round < 15; ++round) {
    const std::uint64_t budget = random.Between(1, 25);
    const ObservedLayerOptions form = RandomForm(random);
    Session run(form, Concat("tova:budget=", budget), random);
    run.Prompt(random.Between(1, 50));
    Positions held = FirstPositions(run.layer.tokens());
    const auto evict = [&](std::uint64_t query) {
      std::vector<double> paid(held.size());
      for (std::uint32_t head = 0; head < form.query_heads; ++head) {
        const std::vector<double> shares = run.layer.SharesOfOriginalKeys(head, query, held);
        for (std::size_t i = 0; i < paid.size(); ++i) paid[i] += shares[i] / form.query_heads;
      }
      Positions kept;
      for (const std::uint32_t i : ReferenceTop(paid, budget)) kept.push_back(held[i]);
      held = kept;
    };
    evict(run.layer.tokens() - 1);
    for (int step = 0; step < 12; ++step) {
      for (const Positions& lane : run.Held()) ASSERT_EQ(lane, held);
      std::uint64_t next = run.layer.tokens();
      const std::vector<std::uint64_t> steps = RandomSteps(random);
      run.Came(steps);
      for (const std::uint64_t tokens : steps) {
        for (std::uint64_t i = 0; i < tokens; ++i) held.push_back(next++);
        evict(next - 1);
      }
    }
  }
}

// Tokens decoded after a prompt, before any decision, are decided one by one all the same.
TEST(DecideContinuing, TovaDecidesAboutStepsBehindAPromptOneByOne) {
  TestRandom random;
  for (int round = 0; round < 15; ++round) {
    constexpr std::uint64_t kBudget = 9, kDecoded = 12;
    const ObservedLayerOptions form = RandomForm(random);
    const std::uint64_t prompt = random.Between(2, 50);
    Session run(form, Concat("tova:budget=", kBudget), random);
    run.layer.Grow(prompt + kDecoded);
    Positions held = FirstPositions(prompt);
    for (std::uint64_t newest = prompt - 1; newest < prompt + kDecoded; ++newest) {
      if (newest >= prompt) held.push_back(newest);
      std::vector<double> paid(held.size());
      for (std::uint32_t head = 0; head < form.query_heads; ++head) {
        const std::vector<double> shares = run.layer.SharesOfOriginalKeys(head, newest, held);
        for (std::size_t i = 0; i < paid.size(); ++i) paid[i] += shares[i] / form.query_heads;
      }
      Positions kept;
      for (const std::uint32_t i : ReferenceTop(paid, kBudget)) kept.push_back(held[i]);
      held = kept;
    }
    const TokenSpan prompts[] = {{0, prompt}};
    const auto decide = [&](std::uint64_t first_shown) {
      LayerView view = run.layer.Show(NeedsOf(run.policy), first_shown);
      view.prompts = prompts;
      return Decide(run.policy, view, run.memory);
    };
    // The newest query alone does not decide about the tokens before it.
    EXPECT_TRUE(absl::IsFailedPrecondition(decide(prompt + kDecoded - 1).status()));
    const auto decision = decide(prompt - 1);
    ASSERT_TRUE(decision.ok()) << decision.status();
    run.layer.Apply(*decision);
    for (const Positions& lane : run.Held()) ASSERT_EQ(lane, held);
  }
}

// kernels/tokens tests the ladder itself.
TEST(DecideContinuing, LaCacheIsTheLadderOfItsLayer) {
  TestRandom random;
  for (int round = 0; round < 15; ++round) {
    const auto layers = static_cast<std::uint32_t>(random.Between(2, 12));
    const bool band = random.OneIn(2);
    const bool uniform = random.OneIn(2);
    const std::string text = Concat("lacache:span=1,sink=3,budget=30,map=", band ? "band" : "mod",
                                    ",pass=", uniform ? "uniform" : "repeat");
    ObservedLayerOptions form = {.layers = layers};
    form.layer = static_cast<std::uint32_t>(random.Below(layers));
    Session run(form, text, random);
    const kernels::LadderOptions options = {
        .layers = layers, .span = 1, .sink = 3, .entries = 30, .band = band, .uniform = uniform};
    kernels::LadderState state;
    std::vector<std::uint32_t> held;
    for (int step = 0; step < 12; ++step) {
      std::uint64_t next = run.layer.tokens();
      std::vector<std::uint64_t> steps = RandomSteps(random);
      if (step == 0 || random.OneIn(5)) {
        steps = {random.Between(1, 90)};
        run.Prompt(steps.front());
      } else {
        run.Came(steps);
      }
      for (const std::uint64_t tokens : steps) {
        for (std::uint64_t i = 0; i < tokens; ++i) {
          held.push_back(static_cast<std::uint32_t>(next++));
        }
        kernels::StepLadder(options, form.layer, state, held);
      }
      for (const Positions& lane : run.Held()) {
        ASSERT_EQ(lane, Positions(held.begin(), held.end())) << text;
      }
    }
  }
}

TEST(DecideContinuing, LaddersThatTheModelCannotHaveAreRefused) {
  const auto why = [](std::string_view text, std::uint32_t layers) {
    const absl::Status status = CheckForModel(Parsed(text), {.layers = layers});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(AsStringView(status.message()));
  };
  for (const std::uint32_t layers : {2u, 4u, 16u, 32u}) {
    EXPECT_TRUE(CheckForModel(Parsed("lacache"), {.layers = layers}).ok()) << layers;
  }
  EXPECT_EQ(why("lacache:span=16", 4), "policy: lacache: span 16 is not 1 to the model's 4 layers");
  EXPECT_EQ(why("lacache:span=16", 16),
            "policy: lacache: span 16 with overlap 0 of 16 layers drops nothing: every layer "
            "keeps all of a ladder's 1 tokens");
  EXPECT_EQ(why("lacache:span=26,overlap=6", 28),
            "policy: lacache: span 26 with overlap 6 of 28 layers drops nothing: every layer "
            "keeps all of a ladder's 2 tokens");
  EXPECT_EQ(
      why("lacache:budget=30,span=8", 32),
      "policy: lacache: budget 30 is too small for ladders over 32 layers; it must be at least "
      "36");
  EXPECT_TRUE(CheckForModel(Parsed("lacache:budget=36,span=8"), {.layers = 32}).ok());
  for (const char* text : {"dense", "mosaickv", "chunkkv:reuse=5", "pyramidkv", "h2o"}) {
    EXPECT_TRUE(CheckForModel(Parsed(text), {.layers = 1}).ok()) << text;
  }
}

}  // namespace
}  // namespace tessera::policies
