// LaCache's ladders: figures of the official code, and the promises of every ladder.
#include "kernels/tokens/ladder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <set>
#include <string>

#include "tests/fakes/seed.h"

namespace tessera::kernels {
namespace {

using testing::ElementsAre;
using testing::ElementsAreArray;

std::vector<std::uint32_t> FirstTokens(std::uint64_t count) {
  std::vector<std::uint32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), 0u);
  return tokens;
}

struct Compaction {
  std::vector<std::uint32_t> kept;
  std::vector<std::uint32_t> dropped;
  LadderState state;
};

// One forward step of this many tokens.
Compaction Compact(const LadderOptions& options, std::uint32_t layer, std::uint64_t tokens) {
  EXPECT_EQ(FaultOf(options), LadderFault::kNone);
  Compaction result = {.kept = FirstTokens(tokens), .dropped = {}, .state = {}};
  StepLadder(options, layer, result.state, result.kept);
  std::ranges::set_difference(FirstTokens(tokens), result.kept, std::back_inserter(result.dropped));
  return result;
}

TEST(Ladder, FiguresOfOneCompaction) {
  LadderOptions options = {.layers = 4, .span = 2, .overlap = 0, .sink = 2, .entries = 16};
  for (const std::uint32_t layer : {0u, 1u, 2u, 3u}) {
    const Compaction result = Compact(options, layer, 17);
    EXPECT_THAT(result.dropped, ElementsAre(layer % 2 == 0 ? 3 : 2));
    EXPECT_EQ(result.state.cursor, 3u);
  }
  options.overlap = 1;
  for (const std::uint32_t layer : {0u, 1u, 2u, 3u}) {
    const Compaction result = Compact(options, layer, 17);
    EXPECT_THAT(result.dropped, ElementsAre(layer % 2 == 0 ? 4 : 2));
    EXPECT_EQ(result.state.cursor, 4u);
  }
  const LadderShape shape = ShapeOf(options);
  EXPECT_EQ(shape.length, 3u);
  EXPECT_EQ(shape.kept, 2u);
  EXPECT_EQ(shape.removed, 1u);
}

TEST(Ladder, FiguresOfWiderLadders) {
  const LadderOptions narrow = {.layers = 8, .span = 2, .overlap = 0, .sink = 4, .entries = 24};
  const std::array<std::vector<std::uint32_t>, 4> dropped = {
      {{5, 6, 7}, {4, 6, 7}, {4, 5, 7}, {4, 5, 6}}};
  for (std::uint32_t layer = 0; layer < 8; ++layer) {
    const Compaction result = Compact(narrow, layer, 26);
    EXPECT_EQ(result.dropped, dropped[layer % 4]) << layer;
    EXPECT_EQ(result.kept.size(), 23u);
    EXPECT_EQ(result.state.cursor, 5u);
    EXPECT_EQ(result.state.capacity, 25u);
  }
  const LadderOptions wide = {.layers = 32, .span = 8, .overlap = 4, .sink = 4, .entries = 256};
  EXPECT_THAT(Compact(wide, 0, 259).dropped, ElementsAre(6, 7, 8, 9, 10));
  EXPECT_THAT(Compact(wide, 1, 259).dropped, ElementsAre(4, 7, 8, 9, 10));
  EXPECT_THAT(Compact(wide, 5, 259).dropped, ElementsAre(4, 5, 6, 7, 8));
  EXPECT_THAT(Compact(wide, 6, 259).dropped, ElementsAre(6, 7, 8, 9, 10));
  EXPECT_EQ(Compact(wide, 0, 259).kept.size(), 254u);
  EXPECT_EQ(Compact(wide, 0, 259).state.capacity, 258u);
}

// The overflow that makes the capacity grow evicts nothing.
TEST(Ladder, TheCapacityGrowsFirst) {
  const LadderOptions options = {.layers = 8, .span = 2, .overlap = 0, .sink = 4, .entries = 24};
  const Compaction result = Compact(options, 0, 25);
  EXPECT_THAT(result.dropped, ElementsAre());
  EXPECT_EQ(result.state.cursor, 4u);
  EXPECT_EQ(result.state.capacity, 25u);
}

TEST(Ladder, SteadyState) {
  const LadderOptions options = {.layers = 8, .span = 2, .overlap = 0, .sink = 4, .entries = 24};
  std::vector<std::uint32_t> held;
  LadderState state;
  for (std::uint32_t token = 0; token < 80; ++token) {
    held.push_back(token);
    StepLadder(options, 0, state, held);
  }
  EXPECT_THAT(held, ElementsAre(0, 1, 2, 3, 4, 20, 36, 52, 59, 63, 67, 68, 69, 70, 71, 72, 73, 74,
                                75, 76, 77, 78, 79));
}

TEST(Ladder, ALongPrompt) {
  LadderOptions options = {.layers = 32, .span = 8, .overlap = 4, .sink = 4, .entries = 1024};
  const auto eighths = [&] {
    std::array<int, 8> counts = {};
    for (const std::uint32_t token : Compact(options, 0, 4096).kept) ++counts[token / 512];
    return counts;
  };
  EXPECT_THAT(eighths(), ElementsAre(46, 42, 42, 42, 42, 73, 227, 512));
  options.uniform = true;
  EXPECT_THAT(eighths(), ElementsAre(46, 80, 146, 146, 147, 147, 146, 168));
}

// The layer-0 pattern of the official code where a pass covers tokens that an earlier pass has
// covered.
TEST(Ladder, TheOldestAreLadderedTwice) {
  const LadderOptions options = {
      .layers = 32, .span = 16, .overlap = 0, .sink = 128, .entries = 2048};
  const auto first_behind_sink = [&](std::uint32_t layer) {
    const std::vector<std::uint32_t> kept = Compact(options, layer, 4096).kept;
    return std::vector<std::uint32_t>(kept.begin() + 128, kept.begin() + 131);
  };
  EXPECT_THAT(first_behind_sink(0), ElementsAre(128, 132, 136));
  EXPECT_THAT(first_behind_sink(1), ElementsAre(131, 135, 139));
}

TEST(Ladder, FaultsAreNamed) {
  const auto fault = [](std::uint32_t layers, std::uint32_t span, std::uint32_t overlap,
                        std::uint64_t sink, std::uint64_t entries) {
    return FaultOf(
        {.layers = layers, .span = span, .overlap = overlap, .sink = sink, .entries = entries});
  };
  EXPECT_EQ(fault(4, 0, 0, 0, 99), LadderFault::kSpan);
  EXPECT_EQ(fault(4, 5, 0, 0, 99), LadderFault::kSpan);
  EXPECT_EQ(fault(4, 2, 2, 0, 99), LadderFault::kOverlap);
  EXPECT_EQ(fault(28, 26, 6, 0, 99), LadderFault::kNothingRemoved);
  EXPECT_EQ(fault(4, 4, 0, 0, 99), LadderFault::kNothingRemoved);
  // 2 sinks, 4 layers, 1 kept: half of the single removed token rounds to zero.
  EXPECT_EQ(fault(4, 2, 0, 2, 6), LadderFault::kTooFewEntries);
  EXPECT_EQ(fault(4, 2, 0, 2, 7), LadderFault::kNone);
}

LadderOptions RandomLadder(TestRandom& random) {
  for (;;) {
    LadderOptions options = {.layers = static_cast<std::uint32_t>(random.Between(2, 40)),
                             .sink = random.Below(20),
                             .band = random.OneIn(2),
                             .uniform = random.OneIn(2)};
    options.span = static_cast<std::uint32_t>(random.Between(1, options.layers));
    options.overlap = static_cast<std::uint32_t>(random.Below(options.span));
    if (FaultOf(options) == LadderFault::kNothingRemoved) continue;
    options.entries = LeastEntries(options) + random.Below(random.OneIn(3) ? 3 : 200);
    return options;
  }
}

std::string Describe(const LadderOptions& options) {
  return "layers " + std::to_string(options.layers) + " span " + std::to_string(options.span) +
         " overlap " + std::to_string(options.overlap) + " sink " + std::to_string(options.sink) +
         " entries " + std::to_string(options.entries);
}

// Prompts and steps of any length: layers keep equally many tokens, sinks and the newest are kept,
// no token is duplicated, and the number kept is never far below the capacity.
TEST(Ladder, WhatEveryLadderPromises) {
  TestRandom random;
  for (int round = 0; round < 300; ++round) {
    const LadderOptions options = RandomLadder(random);
    SCOPED_TRACE(Describe(options));
    const LadderShape shape = ShapeOf(options);
    std::vector<std::vector<std::uint32_t>> held(options.layers);
    std::vector<LadderState> states(options.layers);
    std::uint32_t tokens = 0;
    for (int step = 0; step < 20; ++step) {
      const auto more = static_cast<std::uint32_t>(random.Between(1, random.OneIn(3) ? 900 : 9));
      for (std::uint32_t layer = 0; layer < options.layers; ++layer) {
        for (std::uint32_t i = 0; i < more; ++i) held[layer].push_back(tokens + i);
        StepLadder(options, layer, states[layer], held[layer]);
        const std::vector<std::uint32_t>& kept = held[layer];
        ASSERT_EQ(kept.size(), held[0].size());
        ASSERT_EQ(states[layer].cursor, states[0].cursor);
        ASSERT_TRUE(std::ranges::is_sorted(kept, std::less_equal<>()));
        for (std::uint32_t i = 0; i < std::min<std::uint64_t>(options.sink, kept.size()); ++i) {
          ASSERT_EQ(kept[i], i);
        }
        const std::uint64_t newest = std::min<std::uint64_t>(ProtectedEntries(options), more);
        ASSERT_EQ(kept[kept.size() - newest], tokens + more - newest);
      }
      tokens += more;
      const std::uint64_t capacity = states[0].capacity != 0 ? states[0].capacity : options.entries;
      ASSERT_LE(held[0].size(), capacity);
      if (tokens > capacity) {
        ASSERT_GT(held[0].size() + shape.removed, capacity);
      }
    }
  }
}

// How many layers keep each token of one ladder: more for its middle than for its ends, and in
// total as many as the layers keep.
TEST(Ladder, CountsOfLayersThatKeepAToken) {
  const auto counts = [](const LadderOptions& options) {
    const LadderShape shape = ShapeOf(options);
    // One entry too many: one ladder.
    const std::uint64_t tokens = options.entries + shape.removed / 2 + 1;
    std::vector<std::uint32_t> kept_by(shape.length);
    for (std::uint32_t layer = 0; layer < options.layers; ++layer) {
      for (const std::uint32_t token : Compact(options, layer, tokens).kept) {
        const std::uint64_t place = token - options.sink;
        if (token >= options.sink && place < shape.length) ++kept_by[place];
      }
    }
    return kept_by;
  };
  LadderOptions options = {.layers = 8, .span = 2, .overlap = 0, .sink = 4, .entries = 24};
  EXPECT_THAT(counts(options), ElementsAre(2, 2, 2, 2));
  options = {.layers = 32, .span = 8, .overlap = 4, .sink = 4, .entries = 256};
  EXPECT_THAT(counts(options), ElementsAre(6, 12, 11, 10, 10, 10, 5));
  options.band = true;
  EXPECT_THAT(counts(options), ElementsAre(6, 11, 10, 11, 11, 10, 5));

  TestRandom random;
  for (int round = 0; round < 100; ++round) {
    options = RandomLadder(random);
    const LadderShape shape = ShapeOf(options);
    options.entries = LeastEntries(options) + 50;
    SCOPED_TRACE(Describe(options));
    std::vector<std::uint32_t> expected(shape.length);
    for (std::uint32_t layer = 0; layer < options.layers; ++layer) {
      const std::uint64_t offset = options.band
                                       ? std::uint64_t{layer} * (shape.removed + 1) / options.layers
                                       : layer % (shape.removed + 1);
      for (std::uint64_t i = 0; i < shape.kept; ++i) ++expected[offset + i];
    }
    EXPECT_EQ(counts(options), expected);
  }
}

// Some layer keeps every token between the sinks and the newest, if there are as many layers as
// offsets.
TEST(Ladder, TogetherLayersCoverEverything) {
  TestRandom random;
  for (int round = 0; round < 200; ++round) {
    LadderOptions options = RandomLadder(random);
    const LadderShape shape = ShapeOf(options);
    options.layers = std::max<std::uint32_t>(options.layers, 1);
    if (options.layers <= shape.removed) continue;  // fewer layers than offsets
    options.entries = LeastEntries(options) + 50;
    const std::uint64_t tokens = options.entries + shape.removed / 2 + 1;
    std::set<std::uint32_t> covered;
    std::set<std::uint64_t> offsets;
    for (std::uint32_t layer = 0; layer < options.layers; ++layer) {
      const std::vector<std::uint32_t> kept = Compact(options, layer, tokens).kept;
      covered.insert(kept.begin(), kept.end());
      offsets.insert(OffsetOf(options, layer));
    }
    EXPECT_EQ(covered.size(), tokens) << Describe(options);
    EXPECT_EQ(offsets.size(), shape.removed + 1) << Describe(options);
    EXPECT_LE(*offsets.rbegin(), shape.removed);
  }
}

// A second implementation of the official rule, with lists.
void ReferenceStep(const LadderOptions& options, std::uint32_t layer, LadderState& state,
                   std::vector<std::uint32_t>& held) {
  const auto l = static_cast<std::int64_t>(options.layers);
  const auto s = static_cast<std::int64_t>(options.span);
  const auto o = static_cast<std::int64_t>(options.overlap);
  const auto sink = static_cast<std::int64_t>(options.sink);
  const auto up = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  const std::int64_t b = 1 + up(l - s, s - o);
  const std::int64_t a = std::min(up(s, s - o), b);
  const std::int64_t r = b - a;
  const auto n = static_cast<std::int64_t>(held.size());
  const auto first = static_cast<std::int64_t>(options.entries);
  if (n <= (state.capacity == 0 ? first : static_cast<std::int64_t>(state.capacity))) return;
  if (state.capacity == 0) {
    state = {.cursor = options.sink,
             .capacity = options.entries + static_cast<std::uint64_t>(r) / 2};
  }
  const auto c = static_cast<std::int64_t>(state.capacity);
  const std::int64_t offset =
      options.band ? layer * (r + 1) / l : static_cast<std::int64_t>(layer) % (r + 1);
  const auto pass = [&](std::int64_t begin, std::int64_t count) {
    std::vector<std::uint32_t> left(held.begin(), held.begin() + begin);
    for (std::int64_t j = 0; j < count; ++j) {
      for (std::int64_t i = 0; i < a; ++i) left.push_back(held[begin + offset + b * j + i]);
    }
    left.insert(left.end(), held.begin() + begin + b * count, held.end());
    held = left;
  };
  const auto need = [&] { return static_cast<std::int64_t>(held.size()) - c; };
  if (need() <= 0) return;
  const std::int64_t fitting =
      std::max<std::int64_t>(0, (c - static_cast<std::int64_t>(state.cursor) - l) / a);
  if (need() <= fitting * r) {
    const std::int64_t count = up(need(), r);
    pass(static_cast<std::int64_t>(state.cursor), count);
    state.cursor += static_cast<std::uint64_t>(a * count);
    return;
  }
  pass(static_cast<std::int64_t>(state.cursor), fitting);
  while (need() > 0) {
    const std::int64_t count = std::min(up(need(), r), (c - sink - l) / a);
    pass(sink, count);
    state.cursor = static_cast<std::uint64_t>(sink + a * count);
  }
}

TEST(Ladder, IsTheRuleWrittenWithLists) {
  TestRandom random;
  for (int round = 0; round < 300; ++round) {
    LadderOptions options = RandomLadder(random);
    options.uniform = false;
    SCOPED_TRACE(Describe(options));
    const auto layer = static_cast<std::uint32_t>(random.Below(options.layers));
    std::vector<std::uint32_t> held;
    std::vector<std::uint32_t> plain;
    LadderState state;
    LadderState plain_state;
    std::uint32_t tokens = 0;
    for (int step = 0; step < 40; ++step) {
      for (std::uint64_t i = random.Between(1, random.OneIn(4) ? 500 : 5); i > 0; --i) {
        held.push_back(tokens);
        plain.push_back(tokens++);
      }
      StepLadder(options, layer, state, held);
      ReferenceStep(options, layer, plain_state, plain);
      ASSERT_THAT(held, ElementsAreArray(plain));
      ASSERT_EQ(state.cursor, plain_state.cursor);
      ASSERT_EQ(state.capacity, plain_state.capacity);
    }
  }
}

}  // namespace
}  // namespace tessera::kernels
