// The interface of token policies. They decide for one layer at a time which entries are kept and
// which are merged. daemon/compaction carries decisions out; nothing here changes a lane or reads a
// key.
//
//   Needs      what the worker must observe: queries, sums of attention, token ids
//   LayerView  the layer's entries and the observations: the input of a decision
//   Decide     decides at the end of a prompt
//   Advance    decides about decoded tokens, for policies that continue while decoding
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

// The properties of a model that determine whether it supports a policy.
struct ModelFacts {
  std::uint32_t layers = 0;
  bool delimiters = false;  // the model was registered with delimiter token ids
};

// What is known of a token, in LayerView::text.
enum class TextMark : std::uint8_t {
  kInside = 0,
  kDelimiter = 1,  // ends a chunk of text
  kNotShown = 2,   // its id has not been observed
};

// What the worker must observe. 0 or false: not needed.
struct Needs {
  // The queries of the newest max(last_queries, ceil(last_share x tokens)) tokens of a prompt, for
  // every query head.
  std::uint32_t last_queries = 0;
  double last_share = 0;
  // In addition, for each query head, its ceil(norm_share x tokens) queries of largest norm.
  double norm_share = 0;
  // For each key, the attention from all queries of the prompt, averaged over the query heads of
  // its kv head.
  bool attention_sums = false;
  bool token_ids = false;
  // Also the queries of decoded tokens.
  bool decode_queries = false;
  // Observations are needed only of the first of this many consecutive layers; the others adopt its
  // decision.
  std::uint32_t layers_alike = 1;

  bool operator==(const Needs&) const = default;
};

// The entries of one lane, by position. A merged entry has the position of its first token.
struct LaneEntries {
  std::uint64_t count = 0;
  std::span<const std::uint64_t> positions;  // [count], ascending
  std::span<const float> weights;            // [count] tokens per entry; empty: all 1
  std::uint64_t before = 0;                  // entries before the view
};

// The observed queries of one query head, by position; each position occurs once.
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
  // The sequence's token at which the view begins; all positions in the view are relative to it.
  // Earlier tokens were decided about before.
  std::uint64_t first = 0;
  std::uint64_t tokens = 0;  // of the view; positions are below it
  // Prompts: tokens that arrived in one forward step each. Ascending and disjoint. All other tokens
  // were decoded one by one.
  std::span<const TokenSpan> prompts;
  std::span<const LaneEntries> lanes;    // by kv head; may differ in length
  std::span<const HeadQueries> queries;  // by query head; empty: none were observed
  // Norms of queries are compared among the tokens from norms_first on: from the first prompt of
  // the view, or all tokens if it has none. The strongest queries of [norms_first,
  // norms_observed_end) have been reported.
  std::uint64_t norms_first = 0;
  std::uint64_t norms_observed_end = ~std::uint64_t{0};
  // `queries` contains at least this many of each head's strongest queries among those tokens; if
  // more are needed, some may be missing.
  std::uint64_t norms_known = ~std::uint64_t{0};
  // By kv head: sums of attention for the lane's first entries, as far as they were observed.
  std::span<const std::span<const float>> sums;
  std::span<const TextMark>
      text;  // by token; may be shorter than `tokens`: the rest is not observed
  // Scores the lanes' keys by entry; may cover more entries than the view. Null for policies that
  // decide by positions only.
  KeyScorer* scorer = nullptr;

  // The number of tokens after the last prompt.
  std::uint64_t decoded() const { return prompts.empty() ? tokens : tokens - prompts.back().end; }
  // The end of the forward step that contains this token.
  std::uint64_t StepEnd(std::uint64_t position) const;
};

// The decision about one lane. Entries that are neither kept nor members of a kept entry are
// dropped.
struct LaneDecision {
  std::vector<std::uint32_t> kept;  // indices of entries, ascending
  // If entries are merged: kept[i] replaces members[begins[i] .. begins[i + 1]), ascending, of
  // which it is the first. Both empty: nothing is merged.
  std::vector<std::uint32_t> begins;  // [kept + 1]
  std::vector<std::uint32_t> members;

  bool merges() const { return !begins.empty(); }
};
using LayerDecision = std::vector<LaneDecision>;  // by kv head

// What a policy remembers of a layer from one decision to the next. Owned by the sequence; a fork
// gets a copy.
struct LayerMemory {
  // LaCache: the entry index at which the next ladder begins, and how many entries fit.
  std::uint64_t cursor = 0;
  std::uint64_t capacity = 0;  // 0: not started
  // H2O: by kv head, the attention that each entry has received.
  std::vector<std::vector<float>> scores;
  // SemantiCache: by kv head, the positions at which chunks of text ended because they were full.
  // Entries on different sides of such a boundary are never merged. Ends at delimiters are not
  // stored, since they follow from the text. Boundaries are facts about the lanes, so they are kept
  // when another policy is set. After a SemantiCache decision a lane has at most one boundary more
  // than entries; boundaries of entries that other policies dropped are pruned by the next
  // decision.
  std::vector<ChunkEnds> boundaries;
  // SemantiCache: chunks of text before this position have been clustered and are not clustered
  // again, unless a budget requires it.
  std::uint64_t clustered_until = 0;

  // The sequence was truncated to `tokens`; decisions cover the first `decided_until` of them.
  void CutTo(std::uint64_t tokens, std::uint64_t decided_until);
};

// The needs of all terms of the policy.
Needs NeedsOf(const Policy& policy);
std::string NeedsText(const Needs& needs);  // "token ids"; "nothing" if there are no needs

// Whether the policy continues to drop tokens while decoding.
bool Continues(const Policy& policy);
// Whether both policies learn the same from every query.
bool LearnsTheSame(const Policy& a, const Policy& b);
// What the lanes of a layer must have in common, for policies that make one decision for all of
// them.
enum class LaneEquality : std::uint8_t { kNothing, kLength, kTokens };
LaneEquality NeededLaneEquality(const Policy& policy);
// Whether kept keys are re-rotated to their index in the lane (pos=slot). The worker's next query
// position then follows the last kept key.
bool MovesPositions(const Policy& policy);
// Whether keys are compared and merged with their rotary positions removed (key_space=pre).
bool UsesUnrotatedKeys(const Policy& policy);
// Whether the policy may merge entries.
bool Merges(const Policy& policy);
// The layer whose decision this layer adopts (ChunkKV's index reuse), or the layer itself.
std::uint32_t DecidesFor(const Policy& policy, std::uint32_t layer);

// Decides at the end of a prompt which entries of a layer are kept. The decision of a lane that
// loses nothing names all of its entries. Policies that continue treat the entries as one forward
// step. `memory` changes only if the decision is OK.
//
// FAILED_PRECONDITION: an observation is missing; the message names it and the call that sends it.
// INVALID_ARGUMENT: the budget cannot be met; the message says which can (see LeavesWhole).
absl::StatusOr<LayerDecision> Decide(const Policy& policy, const LayerView& view,
                                     LayerMemory& memory);

// Whether the refusal means that the prompt is too short for the policy's budget. The tokens then
// wait, uncompressed, for more tokens or another policy; more observations would not help.
bool LeavesWhole(const absl::Status& refusal);

// Decides while decoding. The first `held` entries of each lane were decided about before; each
// later entry is one token. The result is the same as if Advance had been called after every
// forward step: a decoded token, or a whole prompt.
absl::StatusOr<LayerDecision> Advance(const Policy& policy, const LayerView& view,
                                      std::span<const std::uint64_t> held, LayerMemory& memory);

}  // namespace tessera::policies
