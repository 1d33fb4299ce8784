// What token policies decide from, one layer of a sequence at a time, and what they decide: which
// entries stay, and which of them stand for others. Rows are moved elsewhere (daemon/compaction);
// nothing here changes a lane, and nothing here sees a key.
//
//   Needs      what the worker is to tell: queries, sums of attention, token ids
//   LayerView  the layer's entries, and what was told
//   Decide     at the end of a prompt, once
//   Advance    of policies that go on while decoding: for tokens that came since
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/policies/chunk_ends.h"
#include "daemon/policies/key_scorer.h"
#include "kernels/format/layer_geometry.h"

namespace tessera::policies {

struct Policy;

// Of the model, what decides whether a policy can be carried out for it.
struct ModelFacts {
  std::uint32_t layers = 0;
  bool delimiters = false;  // it was registered with token ids that end a chunk of text
};

// In LayerView::text.
enum class TextMark : std::uint8_t {
  kInside = 0,
  kDelimiter = 1,  // ends a chunk of text
  kNotShown = 2,   // the worker has not said which token it is
};

// What the worker is asked for while it prefills. Everything is 0 or false where nothing is wanted.
struct Needs {
  // The rows of the newest queries, every query head's: so many, or ceil(last_share x tokens) where
  // that is more.
  std::uint32_t last_queries = 0;
  double last_share = 0;
  // Of each query head ceil(share x tokens) rows, those of the largest norm; 0: none. In addition
  // to the last ones.
  double norm_share = 0;
  // For each key the attention that all queries of the prompt pay it, averaged over the query heads
  // of its kv head.
  bool attention_sums = false;
  bool token_ids = false;
  // Of tokens that are decoded the queries, too.
  bool decode_queries = false;
  // Nothing of these is wanted but of the first of so many layers in a row: the others take over
  // what is decided for it.
  std::uint32_t layers_alike = 1;

  bool operator==(const Needs&) const = default;
};

// The entries of one lane, by position. An entry that stands for several tokens has the position
// of the first of them.
struct LaneEntries {
  std::uint64_t count = 0;
  std::span<const std::uint64_t> positions;  // [count], ascending
  std::span<const float> weights;            // [count] tokens each stands for; empty: 1
  std::uint64_t before = 0;                  // entries out of sight, of tokens before the view's
};

// Queries of one query head that the worker has shown, by position, each position once.
struct HeadQueries {
  std::span<const std::uint64_t> positions;  // [count], ascending
  const std::byte* rows = nullptr;           // [count][head_dim] of the layer's type
};

// Tokens [begin, end).
struct TokenSpan {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  bool operator==(const TokenSpan&) const = default;
};

struct LayerView {
  std::uint32_t layer = 0;
  std::uint32_t layers = 0;  // of the model
  kernels::LayerGeometry geometry;
  // Positions count from there. Tokens before it are out of sight: others decided about them.
  std::uint64_t first = 0;
  std::uint64_t tokens = 0;  // in sight; positions are below it
  // Those that came in one forward step each, rising and apart; the others came one by one.
  std::span<const TokenSpan> prompts;
  std::span<const LaneEntries> lanes;    // by kv head; may differ in length
  std::span<const HeadQueries> queries;  // by query head; empty: none were shown
  // By norm the queries of the tokens from there on are compared: of the first prompt in sight, or
  // of all where there is none. Of these, up to before norms_observed_end at least, somebody has
  // told which are the strongest.
  std::uint64_t norms_first = 0;
  std::uint64_t norms_observed_end = ~std::uint64_t{0};
  // Among `queries` so many of each head are the strongest of these tokens, of those that somebody
  // has seen; of more than that some may be missing.
  std::uint64_t norms_known = ~std::uint64_t{0};
  // By kv head: for the lane's first entries, as far as they were shown; empty: none were.
  std::span<const std::span<const float>> sums;
  std::span<const TextMark> text;  // by token; shorter than `tokens`: the others are not shown
  // Of the lanes' keys, entry by entry; it may hold more of them. Null for policies that need
  // nothing: they go by positions.
  KeyScorer* scorer = nullptr;

  // The newest tokens, which are no prompt's.
  std::uint64_t decoded() const { return prompts.empty() ? tokens : tokens - prompts.back().end; }
  // Behind the last token of the forward step that this one came in.
  std::uint64_t StepEnd(std::uint64_t position) const;
};

// What becomes of one lane. Entries that are neither kept nor members go.
struct LaneDecision {
  std::vector<std::uint32_t> kept;  // indices of entries, ascending
  // Where entries are merged: those that kept[i] stands for, itself the first, ascending, are
  // members[begins[i] .. begins[i + 1]). Both empty: every entry stands for itself.
  std::vector<std::uint32_t> begins;  // [kept + 1]
  std::vector<std::uint32_t> members;

  bool merges() const { return !begins.empty(); }
};
using LayerDecision = std::vector<LaneDecision>;  // by kv head

// What a policy remembers of a layer from one decision to the next. Goes with the sequence; a fork
// has a copy.
struct LayerMemory {
  // LaCache: where the next ladder begins, as an index of entries, and how many entries fit.
  std::uint64_t cursor = 0;
  std::uint64_t capacity = 0;  // 0: not started
  // H2O: by kv head, of each entry the attention that was paid to it.
  std::vector<std::vector<float>> scores;
  // SemantiCache: by kv head where chunks of text have ended because they were full: entries at or
  // behind such a position are never merged with those before it. Empty: none is known. What the
  // text says is not repeated here. They are facts about the lanes: another policy of the sequence
  // keeps them. When SemantiCache has decided, a lane has as many of them as entries, and one, at
  // most; those of entries that others have dropped since go with its next decision.
  std::vector<ChunkEnds> boundaries;
  // SemantiCache: chunks of text that lie before this position have been clustered, and are not
  // clustered again.
  std::uint64_t clustered_until = 0;

  // The sequence was cut to so many tokens, the first `decided_until` of which were decided about.
  void CutTo(std::uint64_t tokens, std::uint64_t decided_until);
};

// Of all that the policy chooses.
Needs NeedsOf(const Policy& policy);
std::string NeedsText(const Needs& needs);  // "token ids"; where nothing is wanted, "nothing"

// Whether the policy goes on while tokens are decoded.
bool Continues(const Policy& policy);
// Whether both learn from every query, and the same of each.
bool LearnsTheSame(const Policy& a, const Policy& b);
// What the lanes of a layer must have in common to be decided about: some policies make one
// decision for all of them.
enum class LaneEquality : std::uint8_t { kNothing, kLength, kTokens };
LaneEquality NeededLaneEquality(const Policy& policy);
// Whether keys are turned to the places that they have after others went, and the worker's next
// query stands behind them.
bool MovesPositions(const Policy& policy);
// Whether keys are compared, and merged, as they were before they were turned to their positions.
bool UsesUnrotatedKeys(const Policy& policy);
// Whether entries may come to stand for several tokens.
bool Merges(const Policy& policy);
// The layer whose decision this one shares (ChunkKV's index reuse); itself: it decides.
std::uint32_t DecidesFor(const Policy& policy, std::uint32_t layer);

// At the end of a prompt: what stays of the entries of a layer. Every lane's decision is complete:
// where nothing is to go it names all entries. Policies that continue take the entries as one
// forward step. FAILED_PRECONDITION where what the worker was to show is missing (the message says
// what, and which call brings it); INVALID_ARGUMENT where a budget cannot be met (it says what
// can), which may leave them whole. `memory` is written by policies that continue, and only where
// the decision is OK.
absl::StatusOr<LayerDecision> Decide(const Policy& policy, const LayerView& view,
                                     LayerMemory& memory);

// Whether a refusal is an answer: for so few tokens the policy has no budget, and they stay as they
// are until there are more, or somebody sets another. Nothing that is missing would change it.
bool LeavesWhole(const absl::Status& refusal);

// While decoding: the first `held` entries of each lane have been decided about before, those
// behind are one token each. As if it had been asked after every forward step that brought some of
// these: each by itself, or all of a prompt.
absl::StatusOr<LayerDecision> Advance(const Policy& policy, const LayerView& view,
                                      std::span<const std::uint64_t> held, LayerMemory& memory);

}  // namespace tessera::policies
