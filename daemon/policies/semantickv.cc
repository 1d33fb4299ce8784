// SemanticKV: the queries of largest norm say what is worth keeping, each kv head for itself.
// semantickv_decide.cc decides.
#include "daemon/policies/semantickv.h"

#include "daemon/policies/rows.h"
#include "daemon/policies/token_budget.h"
#include "daemon/policies/token_system.h"

namespace tessera::policies {
namespace {

using Aggregate = SemanticKvPolicy::Aggregate;

constexpr std::string_view kKeepTotal = "keep_total";
constexpr std::string_view kKeepMiddle = "keep_middle";
constexpr std::string_view kMaskWords[] = {"causal", "none"};
constexpr std::string_view kNormWords[] = {"fixed", "visible"};
constexpr std::string_view kAggregateWords[] = {"mean", "max", "sum"};

constexpr Option kOptions[] = {
    {.name = "lambda",
     .type = OptionType::kNumber,
     .standard = "0.01",
     .unit = "share",
     .help = "Of the queries of each head so many judge, those of the largest norm, beside those "
             "of the newest tokens"},
    {.name = "recent_ratio",
     .type = OptionType::kNumber,
     .standard = "0.01",
     .unit = "share",
     .help = "Of the tokens so many, the newest, stay, and at least one"},
    {.name = "sink",
     .type = OptionType::kCount,
     .standard = "256",
     .most = kMostPinned,
     .unit = "tokens",
     .help = "The first tokens, which stay"},
    {.name = kKeepTotal,
     .type = OptionType::kNumber,
     .standard = "0.2",
     .above_least = true,
     .unit = "share",
     .help = "Of the tokens so many stay, the first and the newest included; not beside "
             "keep_middle"},
    {.name = kKeepMiddle,
     .type = OptionType::kNumber,
     .unit = "share",
     .help = "Of the tokens between the first and the newest so many stay; instead of keep_total"},
    {.name = "mask",
     .type = OptionType::kWord,
     .standard = "causal",
     .words = kMaskWords,
     .help = "Whether the queries see only what was before them, or all tokens as in NACL"},
    {.name = "norm",
     .type = OptionType::kWord,
     .standard = "fixed",
     .words = kNormWords,
     .help = "Whether what a token is paid is divided by all judging queries, or by those after "
             "it"},
    {.name = "agg",
     .type = OptionType::kWord,
     .standard = "mean",
     .words = kAggregateWords,
     .help = "How the query heads of a kv head count together"},
};

std::string Check(const Term& term, std::span<const Term>) {
  if (term.values.given(kKeepTotal) && term.values.given(kKeepMiddle)) {
    return "keep_total and keep_middle are both given; each is the budget by itself";
  }
  if (term.values.Word("mask") == kMaskWords[1] && term.values.Word("norm") == kNormWords[1]) {
    return "norm is visible, but with mask none every query sees every token";
  }
  return "";
}

void Apply(const Values& values, Policy& policy) {
  SemanticKvPolicy semantic;
  semantic.lambda = values.Number("lambda");
  semantic.recent_ratio = values.Number("recent_ratio");
  semantic.sink = values.Count("sink");
  if (values.given(kKeepMiddle)) {
    semantic.keep_middle = values.Number(kKeepMiddle);
  } else {
    semantic.keep_total = values.Number(kKeepTotal);
  }
  semantic.causal = values.Word("mask") == kMaskWords[0];
  semantic.norm_visible = values.Word("norm") == kNormWords[1];
  for (const Aggregate aggregate : {Aggregate::kMean, Aggregate::kMax, Aggregate::kSum}) {
    if (values.Word("agg") == kAggregateWords[static_cast<int>(aggregate)]) {
      semantic.aggregate = aggregate;
    }
  }
  policy.tokens = semantic;
}

std::optional<Values> Read(const Policy& policy) {
  const auto* const semantic = TokensOf<SemanticKvPolicy>(policy);
  if (semantic == nullptr) return std::nullopt;
  Values values(kOptions);
  values.Give("lambda", semantic->lambda);
  values.Give("recent_ratio", semantic->recent_ratio);
  values.Give("sink", static_cast<double>(semantic->sink));
  if (semantic->keep_middle.has_value()) {
    values.Give(kKeepMiddle, *semantic->keep_middle);
  } else {
    values.Give(kKeepTotal, semantic->keep_total);
  }
  values.Give("mask", kMaskWords[semantic->causal ? 0 : 1]);
  values.Give("norm", kNormWords[semantic->norm_visible ? 1 : 0]);
  values.Give("agg", kAggregateWords[static_cast<int>(semantic->aggregate)]);
  return values;
}

Needs NeedsFrom(const TokenPolicy& tokens) {
  const auto& semantic = std::get<SemanticKvPolicy>(tokens);
  return {.last_queries = 1, .last_share = semantic.recent_ratio, .norm_share = semantic.lambda};
}

absl::StatusOr<LayerDecision> DecideLayer(const TokenPolicy& tokens, const LayerView& view,
                                          LayerMemory&) {
  return DecideSemantic(std::get<SemanticKvPolicy>(tokens), view);
}

constexpr TokenSystem kSystem = {
    .is = Is<SemanticKvPolicy>, .needs = NeedsFrom, .decide = DecideLayer};

}  // namespace

constexpr TermKind kSemanticKv = {
    .name = kSemanticKvName,
    .is =
        "Of a prompt the first and the newest tokens stay, and those that the queries of largest "
        "norm attend to most",
    .sets = "tokens, once at the end of a prompt, each kv head its own",
    .paper = "SemanticKV (Huang et al., A Semantics-Driven KV Cache Eviction Framework)",
    .decides = Decides::kTokens,
    .options = kOptions,
    .check = Check,
    .apply = Apply,
    .read = Read,
    .tokens = &kSystem,
};

}  // namespace tessera::policies
