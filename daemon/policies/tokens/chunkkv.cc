// ChunkKV: scores and keeps chunks of consecutive tokens as a whole.
//
// Mode paper: chunks are cells of a grid that starts at position 0. The window is kept, then the
// best chunks, until the budget is met exactly; the last chunk is cut to fit. A chunk that
// straddles the window is scored with its tokens inside. Softmax scores are scaled and causal,
// logits neither. Mode kvpress: SnapKV's scores, with the window above all others; a share of whole
// chunks is kept, rounded as kvpress does. With reuse the layers must have equally many kv heads,
// and the worker observes only the deciding layers.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/base/strings.h"
#include "daemon/cache/model/model.h"
#include "daemon/policies/registry_rows.h"
#include "daemon/policies/token_system.h"
#include "daemon/policies/tokens/shared/keep.h"
#include "daemon/policies/tokens/shared/observed_prompt.h"
#include "daemon/policies/tokens/shared/token_budget.h"
#include "daemon/policies/tokens/shared/window_scores.h"

namespace tessera::policies {
namespace {

constexpr std::string_view kChunkKvName = "chunkkv";

// ---- The decision about a layer

using Scores = std::vector<double>;

// Entries [begin, end) of a lane whose positions are in the same cell of a grid. In mode paper the
// grid starts at the sequence's first token.
struct Chunk {
  std::uint64_t begin;
  std::uint64_t end;
  double score = 0;

  std::uint64_t size() const { return end - begin; }
};

std::vector<Chunk> ChunksOf(const LaneEntries& lane, std::uint64_t first, std::uint32_t length) {
  std::vector<Chunk> chunks;
  const auto cell = [&](std::uint64_t i) { return (first + lane.positions[i]) / length; };
  for (std::uint64_t i = 0; i < lane.count; ++i) {
    if (i == 0 || cell(i) != cell(i - 1)) chunks.push_back({.begin = i, .end = i});
    chunks.back().end = i + 1;
  }
  return chunks;
}

// Scores the chunks and sorts them, best first. Ties go to the older chunk. Among chunks that lie
// wholly in the window, which have equal scores in mode kvpress, ties go to the newer one, so that
// the newest tokens are dropped last.
std::vector<Chunk> Judged(const LaneEntries& lane, const ChunkKvPolicy& chunk, const Scores& scores,
                          std::vector<Chunk> chunks) {
  const std::uint64_t window_begin = lane.count - chunk.window;
  for (Chunk& one : chunks) {
    const auto first = scores.begin() + static_cast<std::ptrdiff_t>(one.begin);
    const double size = static_cast<double>(one.size());
    if (chunk.kvpress && one.begin >= window_begin) {
      // All scores are equal: take their mean or sum without rounding errors.
      one.score = chunk.mean ? *first : *first * size;
      continue;
    }
    one.score = std::accumulate(first, first + static_cast<std::ptrdiff_t>(one.size()), 0.0);
    if (chunk.mean) one.score /= size;
    if (std::isnan(one.score)) one.score = -std::numeric_limits<double>::infinity();
  }
  std::ranges::sort(chunks, [window_begin](const Chunk& a, const Chunk& b) {
    if (a.score != b.score) return a.score > b.score;
    const bool both_inside = a.begin >= window_begin && b.begin >= window_begin;
    return both_inside ? a.begin > b.begin : a.begin < b.begin;
  });
  return chunks;
}

// Keeps the window, then chunk by chunk the entries outside of the window, until `entries` are
// kept.
LaneDecision KeepExactly(const LaneEntries& lane, const std::vector<Chunk>& chunks,
                         std::uint64_t entries, std::uint64_t window) {
  const std::uint64_t window_begin = lane.count - window;
  LaneDecision decision = {.kept = Indices(window_begin, lane.count)};
  for (const Chunk& chunk : chunks) {
    const std::uint64_t end = std::min(chunk.end, window_begin);
    for (std::uint64_t i = chunk.begin; i < end && decision.kept.size() < entries; ++i) {
      decision.kept.push_back(static_cast<std::uint32_t>(i));
    }
  }
  std::ranges::sort(decision.kept);
  return decision;
}

// Keeps a share of the chunks, as kvpress does. kvpress is given the share to drop and subtracts it
// from 1, which rounds: with 20 chunks, a share of 0.2 keeps 3, because 1 - 0.8 is less than 0.2.
LaneDecision KeepShare(const std::vector<Chunk>& chunks, double share) {
  const double goes = 1 - share;
  const auto wanted = static_cast<std::size_t>(static_cast<double>(chunks.size()) * (1 - goes));
  const std::size_t count = std::clamp<std::size_t>(wanted, 1, chunks.size());
  LaneDecision decision;
  for (const Chunk& chunk : std::span(chunks).first(count)) {
    for (std::uint64_t i = chunk.begin; i < chunk.end; ++i) {
      decision.kept.push_back(static_cast<std::uint32_t>(i));
    }
  }
  std::ranges::sort(decision.kept);
  return decision;
}

// By kv head, one score per entry; empty for a lane that is not longer than the window. Scores are
// averaged over the query heads of the group, which gives the same order as their sum.
absl::StatusOr<std::vector<Scores>> PaperScores(const ChunkKvPolicy& chunk, const LayerView& view) {
  std::vector<Scores> scores(view.lanes.size());
  for (std::uint32_t head = 0; head < view.geometry.query_heads; ++head) {
    const std::uint32_t kv_head = head / view.geometry.group();
    const LaneEntries& lane = view.lanes[kv_head];
    if (lane.count <= chunk.window) continue;
    const auto queries = NewestQueries(kChunkKvName, view, head, chunk.window);
    if (!queries.ok()) return queries.status();
    scores[kv_head].resize(lane.count);
    kernels::KeyObservation look = {.queries = queries->rows,
                                    .log2_weights = kernels::Log2Weights(lane.weights),
                                    .logits = chunk.logit,
                                    .sums = scores[kv_head]};
    look.visible = chunk.logit ? kernels::FullRanges(chunk.window, lane.count)
                               : kernels::CausalRanges(queries->positions, lane.positions,
                                                       view.geometry.sliding_window);
    absl::Status status = view.scorer->Look(kv_head, std::span(&look, 1));
    if (!status.ok()) return status;
  }
  for (Scores& of_lane : scores) {
    for (double& score : of_lane) score /= view.geometry.group();
  }
  return scores;
}

// SnapKV's scores; entries in the window score higher than the maximum over all heads.
absl::StatusOr<std::vector<Scores>> KvpressScores(const ChunkKvPolicy& chunk,
                                                  const LayerView& view) {
  auto scores = WindowScores(kChunkKvName, view, {.window = chunk.window});
  if (!scores.ok()) return scores;
  double largest = 0;
  for (const Scores& of_lane : *scores) {
    if (!of_lane.empty()) largest = std::max(largest, std::ranges::max(of_lane));
  }
  for (std::size_t lane = 0; lane < scores->size(); ++lane) {
    if (!(*scores)[lane].empty()) (*scores)[lane].resize(view.lanes[lane].count, largest + 1);
  }
  return scores;
}

void SumOverHeads(std::vector<Scores>& scores) {
  for (std::size_t lane = 1; lane < scores.size(); ++lane) {
    std::ranges::transform(scores.front(), scores[lane], scores.front().begin(), std::plus<>());
  }
}

LaneDecision DecideLane(const ChunkKvPolicy& chunk, const LaneEntries& lane, std::uint64_t first,
                        const Scores& scores, std::uint64_t entries) {
  if (lane.count <= chunk.window) return KeepAll(lane);
  if (!chunk.kvpress) {
    if (lane.count <= entries) return KeepAll(lane);
    return KeepExactly(lane, Judged(lane, chunk, scores, ChunksOf(lane, first, chunk.chunk)),
                       entries, chunk.window);
  }
  // The grid of kvpress begins at the first entry. With fewer entries than one chunk, kvpress
  // scores single tokens.
  const std::uint32_t length = lane.count < chunk.chunk ? 1 : chunk.chunk;
  return KeepShare(Judged(lane, chunk, scores, ChunksOf(lane, 0, length)), chunk.budget.share);
}

absl::StatusOr<LayerDecision> DecideChunks(const ChunkKvPolicy& chunk, const LayerView& view) {
  if (KeepsEverything(view, chunk.window)) return KeepAll(view);
  std::uint64_t entries = 0;  // used in mode paper only
  if (!chunk.kvpress) {
    const auto budget = EntriesOf(kChunkKvName, chunk.budget, view, chunk.window);
    if (!budget.ok()) return budget.status();
    entries = *budget;
  }
  if (KeepsEverything(view, entries)) return KeepAll(view);
  const bool per_layer = chunk.scope == Scope::kLayer;
  if (per_layer) {
    if (absl::Status status = CheckEqualLanes(kChunkKvName, view); !status.ok()) return status;
  }
  auto scores = chunk.kvpress ? KvpressScores(chunk, view) : PaperScores(chunk, view);
  if (!scores.ok()) return scores.status();
  if (per_layer) {
    SumOverHeads(*scores);
    const LaneDecision same =
        DecideLane(chunk, view.lanes.front(), view.first, scores->front(), entries);
    return LayerDecision(view.lanes.size(), same);
  }
  LayerDecision decision;
  for (std::size_t lane = 0; lane < view.lanes.size(); ++lane) {
    decision.push_back(DecideLane(chunk, view.lanes[lane], view.first, (*scores)[lane], entries));
  }
  return decision;
}

// ---- The registry row

constexpr std::string_view kModeWords[] = {"paper", "kvpress"};
constexpr std::string_view kAggregateWords[] = {"sum", "mean"};
constexpr std::string_view kScoreWords[] = {"softmax", "logit"};

// The defaults of a mode.
ChunkKvPolicy Standard(bool kvpress) {
  ChunkKvPolicy chunk;
  chunk.kvpress = kvpress;
  chunk.chunk = kvpress ? 20 : 10;
  chunk.window = kvpress ? 64 : 32;
  chunk.mean = kvpress;
  return chunk;
}

constexpr Option kOptions[] = {
    {.name = "mode",
     .type = OptionType::kWord,
     .standard = "paper",
     .words = kModeWords,
     .help = "Whether to work like the paper's Algorithm 1, or like kvpress, which smooths scores "
             "and keeps a share of whole chunks"},
    {.name = "chunk",
     .type = OptionType::kCount,
     .least = 1,
     .most = kMostWindow,
     .unit = "tokens",
     .help = "Number of consecutive tokens that are kept or dropped together; default 10, in mode "
             "kvpress 20"},
    {.name = "window",
     .type = OptionType::kCount,
     .least = 1,
     .most = kMostWindow,
     .unit = "tokens",
     .help = "Number of newest tokens whose queries score the chunks; default 32, in mode kvpress "
             "64"},
    kBudgetOption,
    kTokensOption,
    {.name = "scope",
     .type = OptionType::kWord,
     .standard = "layer",
     .words = kScopeWords,
     .help = "Whether all kv heads of a layer keep the same chunks, or each chooses separately"},
    {.name = "agg",
     .type = OptionType::kWord,
     .words = kAggregateWords,
     .help = "How token scores combine into a chunk's score; default sum, in mode kvpress mean"},
    {.name = "score",
     .type = OptionType::kWord,
     .standard = "softmax",
     .words = kScoreWords,
     .help = "Whether tokens are scored by softmax attention or, only in mode paper, by raw "
             "logits"},
    {.name = "reuse",
     .type = OptionType::kCount,
     .standard = "1",
     .least = 1,
     .most = cache::kMaxLayers,
     .unit = "layers",
     .help = "Number of consecutive layers that share the decision of the first one; 2 is safe"},
};

bool Kvpress(const Values& values) { return values.Word("mode") == kModeWords[1]; }

std::string Check(const Term& term, std::span<const Term>) {
  const Values& values = term.values;
  if (!Kvpress(values)) {
    const std::uint64_t window =
        values.given("window") ? values.Count("window") : Standard(false).window;
    return BudgetConflict(values, window);
  }
  if (values.given(kTokens)) {
    return "tokens is given, but mode kvpress keeps a share of the chunks";
  }
  if (values.Word("score") == kScoreWords[1]) {
    return "score is logit, but mode kvpress scores by softmax attention";
  }
  return "";
}

void Apply(const Values& values, Policy& policy) {
  ChunkKvPolicy chunk = Standard(Kvpress(values));
  if (values.given("chunk")) chunk.chunk = values.Count32("chunk");
  if (values.given("window")) chunk.window = values.Count32("window");
  if (values.given("agg")) chunk.mean = values.Word("agg") == kAggregateWords[1];
  chunk.budget = BudgetOf(values);
  chunk.scope = ScopeOf(values.Word("scope"));
  chunk.logit = values.Word("score") == kScoreWords[1];
  chunk.reuse = values.Count32("reuse");
  policy.tokens = chunk;
}

std::optional<Values> Read(const Policy& policy) {
  const auto* const chunk = TokensOf<ChunkKvPolicy>(policy);
  if (chunk == nullptr) return std::nullopt;
  const ChunkKvPolicy standard = Standard(chunk->kvpress);
  Values values(kOptions);
  values.Give("mode", kModeWords[chunk->kvpress ? 1 : 0]);
  if (chunk->chunk != standard.chunk) values.Give("chunk", chunk->chunk);
  if (chunk->window != standard.window) values.Give("window", chunk->window);
  GiveBudget(chunk->budget, values);
  values.Give("scope", ScopeWord(chunk->scope));
  if (chunk->mean != standard.mean) values.Give("agg", kAggregateWords[chunk->mean ? 1 : 0]);
  values.Give("score", kScoreWords[chunk->logit ? 1 : 0]);
  values.Give("reuse", chunk->reuse);
  return values;
}

Needs NeedsFrom(const TokenPolicy& tokens) {
  const auto& chunk = std::get<ChunkKvPolicy>(tokens);
  return {.last_queries = chunk.window, .layers_alike = chunk.reuse};
}

absl::StatusOr<LayerDecision> DecideLayer(const TokenPolicy& tokens, const LayerView& view,
                                          LayerMemory&) {
  return DecideChunks(std::get<ChunkKvPolicy>(tokens), view);
}

LaneEquality WantsAlike(const TokenPolicy& tokens) {
  return std::get<ChunkKvPolicy>(tokens).scope == Scope::kLayer ? LaneEquality::kTokens
                                                                : LaneEquality::kNothing;
}

constexpr TokenSystem kSystem = {.is = Is<ChunkKvPolicy>,
                                 .needs = NeedsFrom,
                                 .decide = DecideLayer,
                                 .lane_equality = WantsAlike};

}  // namespace

constexpr TermKind kChunkKv = {
    .name = kChunkKvName,
    .is = "Keeps the newest tokens of a prompt, and the chunks that their queries attend to most",
    .sets = "tokens, once at the end of a prompt",
    .paper = "ChunkKV (arXiv 2502.00299)",
    .decides = Decides::kTokens,
    .options = kOptions,
    .check = Check,
    .apply = Apply,
    .read = Read,
    .tokens = &kSystem,
};

}  // namespace tessera::policies
