// SemantiCache: within a chunk of text keys that point the same way become one, which counts as
// often as there were. semanticache_decide.cc decides.
#include "daemon/policies/semanticache.h"

#include "daemon/base/strings.h"
#include "daemon/policies/rows.h"
#include "daemon/policies/token_budget.h"
#include "daemon/policies/token_system.h"
#include "daemon/policies/window_scores.h"

namespace tessera::policies {
namespace {

constexpr std::string_view kTau = "tau";

constexpr Option kOptions[] = {
    {.name = kTau,
     .type = OptionType::kNumber,
     .standard = "0.7",
     .help = "Keys whose cosine with the first of a cluster is above this join it; not beside "
             "budget"},
    {.name = kBudget,
     .type = OptionType::kNumber,
     .above_least = true,
     .unit = "share",
     .help = "Of the tokens so many entries stay in a layer at most, by the largest tau that does "
             "it; instead of tau"},
    {.name = "scope",
     .type = OptionType::kWord,
     .standard = "head",
     .words = kScopeWords,
     .help = "Whether each kv head clusters its own keys, or all of a layer their keys joined"},
    {.name = "delimiters",
     .type = OptionType::kSwitch,
     .standard = "1",
     .help = "Whether a chunk of text ends at the model's delimiters, which are never clustered"},
    {.name = "max_chunk",
     .type = OptionType::kCount,
     .standard = "256",
     .least = 1,
     .most = kMostWindow,
     .unit = "tokens",
     .help = "A chunk of text ends after so many tokens at the latest"},
    {.name = "sink",
     .type = OptionType::kCount,
     .standard = "4",
     .most = kMostPinned,
     .unit = "tokens",
     .help = "The first tokens, which are never clustered; 0 in the paper"},
    {.name = "recent",
     .type = OptionType::kCount,
     .standard = "32",
     .most = kMostPinned,
     .unit = "tokens",
     .help = "The newest tokens, which are not clustered; 0 in the paper"},
    {.name = "leave_open",
     .type = OptionType::kSwitch,
     .standard = "0",
     .help = "Whether the last chunk is left alone until it ends"},
};

std::string Check(const Term& term, std::span<const Term>) {
  if (term.values.given(kTau) && term.values.given(kBudget)) {
    return "tau and budget are both given; tau follows from the budget";
  }
  return "";
}

void Apply(const Values& values, Policy& policy) {
  SemantiCachePolicy cache = {.scope = ScopeOf(values.Word("scope")),
                              .delimiters = values.Switch("delimiters"),
                              .max_chunk = values.Count32("max_chunk"),
                              .sink = values.Count("sink"),
                              .recent = values.Count("recent"),
                              .leave_open = values.Switch("leave_open")};
  if (values.given(kBudget)) {
    cache.budget = values.Number(kBudget);
  } else {
    cache.tau = values.Number(kTau);
  }
  policy.tokens = cache;
}

std::optional<Values> Read(const Policy& policy) {
  const auto* const cache = TokensOf<SemantiCachePolicy>(policy);
  if (cache == nullptr) return std::nullopt;
  Values values(kOptions);
  if (cache->budget.has_value()) {
    values.Give(kBudget, *cache->budget);
  } else {
    values.Give(kTau, cache->tau);
  }
  values.Give("scope", ScopeWord(cache->scope));
  values.Give("delimiters", cache->delimiters);
  values.Give("max_chunk", cache->max_chunk);
  values.Give("sink", static_cast<double>(cache->sink));
  values.Give("recent", static_cast<double>(cache->recent));
  values.Give("leave_open", cache->leave_open);
  return values;
}

Needs NeedsFrom(const TokenPolicy& tokens) {
  return {.token_ids = std::get<SemantiCachePolicy>(tokens).delimiters};
}

absl::StatusOr<LayerDecision> DecideLayer(const TokenPolicy& tokens, const LayerView& view,
                                          LayerMemory&) {
  return DecideClusters(std::get<SemantiCachePolicy>(tokens), view);
}

absl::Status CheckModel(const TokenPolicy& tokens, const ModelFacts& model) {
  if (!std::get<SemantiCachePolicy>(tokens).delimiters || model.delimiters) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      Concat("policy: ", kSemantiCacheName,
             ": chunks of text end at delimiters, and the model was registered without any; name "
             "them in its geometry (delimiter_token_ids), or say delimiters=0"));
}

constexpr TokenSystem kSystem = {.is = Is<SemantiCachePolicy>,
                                 .needs = NeedsFrom,
                                 .decide = DecideLayer,
                                 .merges = true,
                                 .check_model = CheckModel};

}  // namespace

constexpr TermKind kSemantiCache = {
    .name = kSemantiCacheName,
    .is =
        "Of a prompt, within a chunk of text, tokens with like keys become one that counts for "
        "all of them",
    .sets = "tokens, once at the end of a prompt; merged entries have weights",
    .paper = "SemantiCache (arXiv 2603.14303)",
    .decides = Decides::kTokens,
    .options = kOptions,
    .check = Check,
    .apply = Apply,
    .read = Read,
    .tokens = &kSystem,
};

}  // namespace tessera::policies
