// ChunkKV: runs of neighbouring tokens are judged and kept together. chunkkv_decide.cc decides.
#include "daemon/policies/chunkkv.h"

#include "daemon/base/strings.h"
#include "daemon/cache/model.h"
#include "daemon/policies/rows.h"
#include "daemon/policies/token_budget.h"
#include "daemon/policies/token_system.h"
#include "daemon/policies/window_scores.h"

namespace tessera::policies {
namespace {

constexpr std::string_view kModeWords[] = {"paper", "kvpress"};
constexpr std::string_view kAggregateWords[] = {"sum", "mean"};
constexpr std::string_view kScoreWords[] = {"softmax", "logit"};

// What they are where nothing is said.
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
     .help = "As the paper's Algorithm 1, or as kvpress: smoothed scores, a share of whole chunks"},
    {.name = "chunk",
     .type = OptionType::kCount,
     .least = 1,
     .most = kMostWindow,
     .unit = "tokens",
     .help = "Tokens that are kept or dropped together; by default 10, in mode kvpress 20"},
    {.name = "window",
     .type = OptionType::kCount,
     .least = 1,
     .most = kMostWindow,
     .unit = "tokens",
     .help = "The newest tokens, whose queries judge the chunks; by default 32, in mode kvpress "
             "64"},
    kBudgetOption,
    kTokensOption,
    {.name = "scope",
     .type = OptionType::kWord,
     .standard = "layer",
     .words = kScopeWords,
     .help = "Whether all kv heads of a layer keep the same chunks, or each its own"},
    {.name = "agg",
     .type = OptionType::kWord,
     .words = kAggregateWords,
     .help = "A chunk's score is its tokens' sum or mean; by default sum, in mode kvpress mean"},
    {.name = "score",
     .type = OptionType::kWord,
     .standard = "softmax",
     .words = kScoreWords,
     .help = "Tokens are judged by shares of attention or, in mode paper, by raw logits"},
    {.name = "reuse",
     .type = OptionType::kCount,
     .standard = "1",
     .least = 1,
     .most = cache::kMaxLayers,
     .unit = "layers",
     .help = "So many layers one after another keep what the first of them keeps; 2 is safe"},
};

bool Kvpress(const Values& values) { return values.Word("mode") == kModeWords[1]; }

std::string Check(const Term& term, std::span<const Term>) {
  const Values& values = term.values;
  if (!Kvpress(values)) {
    const std::uint64_t window =
        values.given("window") ? values.Count("window") : Standard(false).window;
    return WhyNoBudget(values, window);
  }
  if (values.given(kTokens)) {
    return "tokens is given, but mode kvpress keeps a share of the chunks";
  }
  if (values.Word("score") == kScoreWords[1]) {
    return "score is logit, but mode kvpress judges by shares of attention";
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
  return {.last_queries = std::get<ChunkKvPolicy>(tokens).window};
}

std::uint32_t Decider(const TokenPolicy& tokens, std::uint32_t layer) {
  const std::uint32_t reuse = std::get<ChunkKvPolicy>(tokens).reuse;
  return layer / reuse * reuse;
}

absl::StatusOr<LayerDecision> DecideLayer(const TokenPolicy& tokens, const LayerView& view,
                                          LayerMemory&) {
  return DecideChunks(std::get<ChunkKvPolicy>(tokens), view);
}

constexpr TokenSystem kSystem = {
    .is = Is<ChunkKvPolicy>, .needs = NeedsFrom, .decide = DecideLayer, .decides_for = Decider};

}  // namespace

constexpr TermKind kChunkKv = {
    .name = kChunkKvName,
    .is = "Of a prompt the newest tokens stay, and the chunks that their queries attend to most",
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
