// SemantiCache's chunks over the life of a sequence (prompts, decoded tokens, cuts and forks),
// compared with an oracle that tracks every token.
#include <map>
#include <set>

#include "daemon/base/strings.h"
#include "daemon/policies/tokens/shared/text_chunks.h"
#include "tests/unit/policies/decide.h"

namespace tessera::policies {
namespace {

using testing::ElementsAre;

struct Rules {
  bool per_layer = false;
  bool delimiters = false;
  bool leave_open = false;
  std::uint64_t max_chunk = 8;
  std::uint64_t sink = 0;
  std::uint64_t recent = 0;

  std::string Text() const {
    return Concat("semanticache:tau=0.5,delimiters=", delimiters ? 1 : 0, ",max_chunk=", max_chunk,
                  ",sink=", sink, ",recent=", recent, ",leave_open=", leave_open ? 1 : 0,
                  ",scope=", per_layer ? "layer" : "head");
  }
};

Rules RandomRules(TestRandom& random) {
  return {.per_layer = random.OneIn(3),
          .delimiters = random.OneIn(2),
          .leave_open = random.OneIn(3),
          .max_chunk = random.Between(1, 9),
          .sink = random.Below(4),
          .recent = random.Below(6)};
}

// The rules for one lane, or for all lanes of a layer together, written without the policy's code.
// Only a token's direction decides about similarity.
class ReferenceLane {
 public:
  struct Entry {
    std::uint64_t direction = 0;
    std::vector<std::uint64_t> tokens;  // the first one is its position

    bool operator==(const Entry&) const = default;
  };

  void Add(std::uint64_t direction) {
    entries_.push_back({direction, {tokens_}});
    ++tokens_;
  }
  // `stays`: tokens that another policy keeps; the others are evicted. `text`: marks of every
  // token.
  void Compress(const Rules& rules, const std::vector<TextMark>& text, bool decoding,
                const std::set<std::uint64_t>* stays = nullptr) {
    if (stays != nullptr) {
      std::erase_if(entries_, [&](const Entry& entry) { return !stays->contains(Place(entry)); });
    }
    if (entries_.size() <= rules.sink + rules.recent) return;
    // The chunk of each entry, by position; computed token by token.
    std::map<std::uint64_t, std::uint64_t> chunk_of;
    std::uint64_t chunk = 0;
    std::uint64_t in_chunk = 0;
    std::size_t next = 0;
    for (std::uint64_t token = 0; token < tokens_; ++token) {
      if (ends_.contains(token) && in_chunk > 0) ++chunk, in_chunk = 0;
      if (next < entries_.size() && Place(entries_[next]) == token) {
        chunk_of[token] = chunk;
        ++in_chunk;
        ++next;
      }
      const bool delimiter = rules.delimiters && text[token] == TextMark::kDelimiter;
      const bool full = in_chunk == rules.max_chunk && chunk_of.contains(token);
      if (full) ends_.insert(token + 1);
      if (delimiter || full) ++chunk, in_chunk = 0;
    }
    if (ends_.contains(tokens_) && in_chunk > 0) ++chunk;
    const std::uint64_t open = chunk;
    std::vector<Entry> left;
    std::vector<bool> seeds;
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      const std::uint64_t place = Place(entries_[i]);
      const bool alone = i < rules.sink || i + rules.recent >= entries_.size() ||
                         (rules.delimiters && text[place] == TextMark::kDelimiter) ||
                         ((rules.leave_open || decoding) && chunk_of[place] == open);
      Entry* seed = nullptr;
      for (std::size_t j = 0; j < left.size() && !alone; ++j) {
        if (!seeds[j] || chunk_of[Place(left[j])] != chunk_of[place]) continue;
        if (left[j].direction != entries_[i].direction) continue;
        seed = &left[j];
        break;
      }
      if (seed == nullptr) {
        left.push_back(entries_[i]);
        seeds.push_back(!alone);
      } else {
        seed->tokens.insert(seed->tokens.end(), entries_[i].tokens.begin(),
                            entries_[i].tokens.end());
      }
    }
    entries_ = std::move(left);
    for (Entry& entry : entries_) std::ranges::sort(entry.tokens);
  }
  // Merged tokens cannot be separated.
  std::uint64_t MergedUntil() const {
    std::uint64_t until = 0;
    for (const Entry& entry : entries_) {
      if (entry.tokens.size() > 1) until = std::max(until, entry.tokens.back() + 1);
    }
    return until;
  }
  void Cut(std::uint64_t tokens) {
    while (!entries_.empty() && Place(entries_.back()) >= tokens) entries_.pop_back();
    std::erase_if(ends_, [&](std::uint64_t end) { return end > tokens; });
    tokens_ = tokens;
  }

  const std::vector<Entry>& entries() const { return entries_; }
  const std::set<std::uint64_t>& ends() const { return ends_; }
  std::uint64_t tokens() const { return tokens_; }
  static std::uint64_t Place(const Entry& entry) { return entry.tokens.front(); }

 private:
  std::vector<Entry> entries_;
  std::set<std::uint64_t> ends_;  // where chunks ended because they were full
  std::uint64_t tokens_ = 0;
};

// A layer with keys in a few orthogonal directions, and the policy's memory of it.
struct Story {
  ObservedLayer layer;
  LayerMemory memory;
  std::vector<ReferenceLane> plain;  // by lane
  std::vector<TextMark> text;
  std::uint64_t prompt_until = 0;

  void Add(std::uint64_t tokens, bool per_layer, TestRandom& random) {
    for (std::uint64_t i = 0; i < tokens; ++i) {
      layer.Grow(1);
      text.push_back(random.OneIn(9) ? TextMark::kDelimiter : TextMark::kInside);
      const std::uint64_t same = random.Below(3);
      for (std::size_t lane = 0; lane < plain.size(); ++lane) {
        const std::uint64_t direction = per_layer ? same : random.Below(3);
        ObservedLayer::Row& key = layer.lanes()[lane].back().key;
        std::ranges::fill(key, 0.0f);
        key[direction] = 1;
        plain[lane].Add(direction);
      }
    }
    layer.text() = text;
  }
  void Cut(std::uint64_t tokens) {
    memory.CutTo(tokens, tokens);
    layer.CutTo(tokens);
    for (ReferenceLane& lane : plain) lane.Cut(tokens);
    text.resize(tokens);
    prompt_until = std::min(prompt_until, tokens);
  }
  // Entries and memory equal those of the oracle.
  void Check() {
    for (std::size_t lane = 0; lane < plain.size(); ++lane) {
      const auto& entries = layer.lanes()[lane];
      ASSERT_EQ(entries.size(), plain[lane].entries().size()) << lane;
      for (std::size_t i = 0; i < entries.size(); ++i) {
        const ReferenceLane::Entry& expected = plain[lane].entries()[i];
        ASSERT_EQ(entries[i].position, ReferenceLane::Place(expected)) << lane << ", entry " << i;
        ASSERT_EQ(entries[i].weight, static_cast<float>(expected.tokens.size())) << lane;
        // No entry stands for tokens on both sides of an end.
        for (const std::uint64_t end : plain[lane].ends()) {
          EXPECT_EQ(expected.tokens.front() < end, expected.tokens.back() < end);
        }
      }
      if (memory.boundaries.empty()) continue;
      EXPECT_LE(memory.boundaries[lane].size(), entries.size() + 1);
      EXPECT_TRUE(std::ranges::is_sorted(memory.boundaries[lane], std::less_equal<>()));
    }
  }
};

Story NewStory(std::uint32_t kv_heads, TestRandom& random) {
  return {.layer = ObservedLayer({.query_heads = kv_heads, .kv_heads = kv_heads}, ExactOperations(),
                                 random),
          .memory = {},
          .plain = std::vector<ReferenceLane>(kv_heads),
          .text = {}};
}

TEST(DecideChunks, ASequencesLifeIsItsDefinition) {
  TestRandom random;
  int merged = 0;
  int cuts = 0;
  for (int round = 0; round < 60; ++round) {
    const Rules rules = RandomRules(random);
    const Policy policy = Parsed(rules.Text());
    const auto kv_heads = static_cast<std::uint32_t>(random.Between(1, 3));
    std::vector<Story> stories;
    stories.push_back(NewStory(kv_heads, random));
    std::string told = rules.Text();
    for (int step = 0; step < 30; ++step) {
      Story& story = random.Pick(stories);
      const std::uint64_t dice = random.Below(10);
      if (dice < 3 || story.layer.tokens() == 0) {
        story.Add(random.Between(1, 20), rules.per_layer, random);
        story.prompt_until = story.layer.tokens();
        Append(told, "\nprompt to ", story.layer.tokens());
      } else if (dice == 3) {
        story.Add(random.Between(1, 12), rules.per_layer, random);
        Append(told, "\ndecoded to ", story.layer.tokens());
      } else if (dice == 4) {
        std::uint64_t merged_until = 0;
        for (const ReferenceLane& lane : story.plain) {
          merged_until = std::max(merged_until, lane.MergedUntil());
        }
        const std::uint64_t cut = random.Between(merged_until, story.layer.tokens());
        Append(told, "\ncut to ", cut);
        story.Cut(cut);
        ++cuts;
      } else if (dice == 5 && stories.size() < 3) {
        Append(told, "\nfork");
        const Story fork = story;
        stories.push_back(fork);
      } else {
        const bool decoding = story.prompt_until < story.layer.tokens();
        Append(told, "\ncompress");
        SCOPED_TRACE(told);
        const auto decision =
            Decide(policy, story.layer.Show(NeedsOf(policy), story.prompt_until), story.memory);
        ASSERT_TRUE(decision.ok()) << decision.status();
        for (const LaneDecision& lane : *decision) merged += lane.merges() ? 1 : 0;
        story.layer.Apply(*decision);
        for (ReferenceLane& lane : story.plain) lane.Compress(rules, story.text, decoding);
        ASSERT_NO_FATAL_FAILURE(story.Check());
      }
    }
  }
  EXPECT_GT(merged, 100);
  EXPECT_GT(cuts, 20);
}

// Each kv head keeps other tokens: a chunk consists of those in its own lane.
TEST(DecideChunks, BesideAChoiceALanesChunksAreOfWhatItKeeps) {
  TestRandom random;
  int merged = 0;
  for (int round = 0; round < 40; ++round) {
    Rules rules = RandomRules(random);
    rules.per_layer = false;
    const std::uint64_t window = random.Between(1, 4);
    const std::string choice =
        Concat("snapkv:tokens=", window + random.Between(1, 40), ",window=", window);
    const Policy policy = Parsed(Concat(choice, "+", rules.Text()));
    Story story = NewStory(2, random);
    for (int pass = 0; pass < 4; ++pass) {
      story.Add(random.Between(10, 40), rules.per_layer, random);
      const LayerView view = story.layer.Show(NeedsOf(policy), story.layer.tokens());
      LayerMemory none;
      const auto stay = Decide(Parsed(choice), view, none);
      ASSERT_TRUE(stay.ok()) << stay.status();
      const auto decision = Decide(policy, view, story.memory);
      ASSERT_TRUE(decision.ok()) << decision.status();
      for (std::size_t lane = 0; lane < story.plain.size(); ++lane) {
        std::set<std::uint64_t> stays;
        for (const std::uint32_t entry : (*stay)[lane].kept) {
          stays.insert(story.layer.lanes()[lane][entry].position);
        }
        story.plain[lane].Compress(rules, story.text, /*decoding=*/false, &stays);
        merged += (*decision)[lane].merges() ? 1 : 0;
      }
      story.layer.Apply(*decision);
      SCOPED_TRACE(Concat(policy.text, ", pass ", pass));
      ASSERT_NO_FATAL_FAILURE(story.Check());
    }
  }
  EXPECT_GT(merged, 20);
}

// A clustered chunk counts as its remaining entries and continues with later ones; a full chunk
// does not.
TEST(DecideChunks, AFullChunkEndsForGood) {
  TestRandom random;
  Story story = NewStory(1, random);
  for (int pass = 0; pass < 2; ++pass) {
    story.layer.Grow(20);
    for (auto& entry : story.layer.lanes()[0]) entry.key = story.layer.lanes()[0][0].key;
    story.layer.Apply(DecisionOf("semanticache:tau=0.5,delimiters=0,max_chunk=8,sink=0,recent=0",
                                 story.layer, story.memory));
  }
  std::vector<std::pair<std::uint64_t, float>> entries;
  for (const auto& entry : story.layer.lanes()[0]) {
    entries.emplace_back(entry.position, entry.weight);
  }
  using testing::Pair;
  EXPECT_THAT(entries, ElementsAre(Pair(0, 8), Pair(8, 8), Pair(16, 11), Pair(27, 8), Pair(35, 5)));
  EXPECT_THAT(story.memory.boundaries, ElementsAre(ElementsAre(8, 16, 27, 35)));
}

// A refused decision leaves no boundaries.
TEST(DecideChunks, ARefusedDecisionRemembersNothing) {
  TestRandom random;
  Story story = NewStory(1, random);
  story.layer.Grow(40);
  const Policy policy = Parsed("semanticache:budget=0.01,delimiters=0,max_chunk=8,sink=0,recent=0");
  EXPECT_FALSE(Decide(policy, story.layer.Show({}, 40), story.memory).ok());
  EXPECT_TRUE(story.memory.boundaries.empty());
}

TextChunks Chunked(const std::vector<std::uint64_t>& positions, std::uint64_t most,
                   const std::vector<std::uint64_t>& delimiters,
                   const std::vector<std::uint64_t>& boundaries, std::uint64_t first = 0,
                   std::uint64_t before = 0) {
  return ChunksOf({.count = positions.size(), .positions = positions, .before = before},
                  {.most_entries = most, .delimiters = delimiters, .first = first}, boundaries);
}
EntryRun RunOf(std::uint64_t begin, std::uint64_t end) { return {.begin = begin, .end = end}; }

TEST(DecideChunks, EndAtDelimitersThatHaveGoneToo) {
  const TextChunks chunks = Chunked({0, 1, 4, 6, 7}, 9, {1, 5, 8}, {});
  EXPECT_THAT(chunks.ended, ElementsAre(RunOf(0, 2), RunOf(2, 3), RunOf(3, 5)));
  EXPECT_EQ(chunks.open, RunOf(5, 5));
  EXPECT_THAT(chunks.boundaries, ElementsAre());
}

TEST(DecideChunks, OneBoundaryBetweenTwoEntriesIsEnough) {
  const TextChunks chunks = Chunked({0, 9, 10}, 9, {}, {3, 5, 9, 20, 30});
  EXPECT_THAT(chunks.ended, ElementsAre(RunOf(0, 1), RunOf(1, 3)));
  EXPECT_EQ(chunks.open, RunOf(3, 3));
  EXPECT_THAT(chunks.boundaries, ElementsAre(3, 20));
}

TEST(DecideChunks, OneBoundaryForEachGapIsEnough) {
  const std::vector<std::uint64_t> positions = {0, 9, 10};
  EXPECT_THAT(PruneBoundaries(positions, {3, 5, 9, 10, 20, 30}), ElementsAre(3, 10, 20));
  EXPECT_THAT(PruneBoundaries(std::vector<std::uint64_t>{5, 9}, {1, 4, 5, 6, 9}),
              ElementsAre(1, 6));
  EXPECT_THAT(PruneBoundaries({}, {1, 4}), ElementsAre(1));
  EXPECT_THAT(PruneBoundaries(positions, {}), ElementsAre());
}

// Boundaries are positions of the sequence. Those between entries that the decision does not see
// are kept, even if another lane's view begins before them.
TEST(DecideChunks, BoundariesAreWhereTheSequenceSays) {
  const TextChunks chunks = Chunked({0, 1, 2, 3, 4}, 3, {}, {40, 60, 101}, 100, 7);
  EXPECT_THAT(chunks.ended, ElementsAre(RunOf(0, 1), RunOf(1, 4)));
  EXPECT_EQ(chunks.open, RunOf(4, 5));
  EXPECT_THAT(chunks.boundaries, ElementsAre(40, 60, 101, 104));
  EXPECT_THAT(Chunked({8, 9}, 3, {}, {40, 102, 104, 108, 109, 110, 112}, 100, 7).boundaries,
              ElementsAre(40, 102, 104, 108, 109, 110));
  EXPECT_THAT(Chunked({}, 3, {2}, {40, 60}, 100, 7).boundaries, ElementsAre(40, 60));
  // If every entry is visible, one boundary before all of them is enough.
  EXPECT_THAT(Chunked({8, 9}, 3, {}, {40, 102, 104}, 100).boundaries, ElementsAre(40));
}

// A delimiter ends its chunk itself, whether or not the chunk is full.
TEST(DecideChunks, ADelimiterThatFillsItsChunkLeavesNoBoundary) {
  const TextChunks chunks = Chunked({0, 1, 2, 3, 4}, 2, {1}, {});
  EXPECT_THAT(chunks.ended, ElementsAre(RunOf(0, 2), RunOf(2, 4)));
  EXPECT_THAT(chunks.boundaries, ElementsAre(4));
}

TEST(DecideChunks, ACutForgetsWhatIsBehindIt) {
  LayerMemory memory = {.boundaries = {{8, 16, 24}, {9, 20}}};
  memory.CutTo(16, 16);
  EXPECT_THAT(memory.boundaries, ElementsAre(ElementsAre(8, 16), ElementsAre(9)));
  // Under a policy that has made no decision yet.
  memory.cursor = 3;
  memory.CutTo(9, 0);
  EXPECT_THAT(memory.boundaries, ElementsAre(ElementsAre(8), ElementsAre(9)));
  EXPECT_EQ(memory.cursor, 0u);
}

// Boundaries left by single kv heads, before a later policy decides for all heads together.
TEST(DecideChunks, WhatOneLaneHasEndedEndsInAllThatAreOne) {
  TestRandom random;
  Story story = NewStory(2, random);
  story.layer.Grow(12);
  for (auto& lane : story.layer.lanes()) {
    for (auto& entry : lane) entry.key = lane[0].key;
  }
  story.memory.boundaries = {{4}, {9}};
  const LayerDecision decision = DecisionOf(
      "semanticache:tau=0.5,delimiters=0,sink=0,recent=0,scope=layer", story.layer, story.memory);
  EXPECT_THAT(KeptOf(decision), ElementsAre(ElementsAre(0, 4, 9), ElementsAre(0, 4, 9)));
  EXPECT_THAT(story.memory.boundaries, ElementsAre(ElementsAre(4, 9), ElementsAre(4, 9)));
}

}  // namespace
}  // namespace tessera::policies
