// SemanticKV: keeps the tokens that the queries of largest norm attend to. Each kv head decides
// separately.
//
// Norms are compared among the queries from the first undecided prompt on, or of all undecided
// tokens if there is no prompt; lambda is a share of these. A query that is both new and of large
// norm counts once. With norm=fixed the divisor includes queries before the token, though they do
// not see it. If the first and the newest tokens alone exceed keep_total, they are kept and nothing
// between them.
#include <algorithm>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/policies/registry_rows.h"
#include "daemon/policies/token_system.h"
#include "daemon/policies/tokens/shared/keep.h"
#include "daemon/policies/tokens/shared/observed_prompt.h"
#include "daemon/policies/tokens/shared/token_budget.h"
#include "kernels/tokens/counts.h"
#include "kernels/tokens/rows.h"
#include "kernels/tokens/top.h"

namespace tessera::policies {
namespace {

constexpr std::string_view kSemanticKvName = "semantickv";

// ---- The decision about a layer

using kernels::CountDown;
using kernels::CountUp;
using Aggregate = SemanticKvPolicy::Aggregate;
using Scores = std::vector<double>;

// The policy's shares as numbers of tokens of this view.
struct Counts {
  std::uint64_t semantic;  // queries of the largest norm that score
  std::uint64_t recent;
  std::uint64_t middle;  // entries to keep between the first and the newest

  Counts(const SemanticKvPolicy& options, const LayerView& view) {
    const std::uint64_t token_count = view.tokens;
    const double tokens = static_cast<double>(token_count);
    semantic = CountUp(options.lambda * static_cast<double>(token_count - view.norms_first));
    recent = std::max<std::uint64_t>(1, CountUp(options.recent_ratio * tokens));
    const std::uint64_t ends = options.sink + recent;
    const auto beyond_ends = [ends](std::uint64_t count) { return count - std::min(count, ends); };
    middle = options.keep_middle.has_value()
                 ? CountDown(*options.keep_middle * static_cast<double>(beyond_ends(token_count)))
                 : beyond_ends(CountDown(options.keep_total * tokens));
  }
  std::uint64_t kept(const SemanticKvPolicy& options) const {
    return options.sink + recent + middle;
  }
};

// The queries of one head that score, copied together.
struct Observers {
  std::vector<std::uint64_t> positions;
  std::vector<std::byte> rows;

  kernels::RowRange span() const { return {.rows = rows.data(), .count = positions.size()}; }
};

// If some of the strongest queries were not observed, weaker ones would take their place and change
// the decision without notice. So this is an error.
absl::Status CheckKnown(const LayerView& view, double lambda, std::uint64_t wanted) {
  if (wanted > 0 && view.norms_observed_end < view.tokens) {
    return Missing(kSemanticKvName, Concat("the queries of largest norm of the tokens from ",
                                           view.first + view.norms_observed_end, " on have"));
  }
  if (wanted <= view.norms_known) return absl::OkStatus();
  return absl::FailedPreconditionError(
      Concat(kSemanticKvName, ": of ", view.tokens - view.norms_first, " tokens, the ", wanted,
             " queries of largest norm are needed, but some were observed for a length of ",
             kernels::MostForShare(view.norms_known, lambda), " tokens, which needs only ",
             view.norms_known, "; observe the tokens again from ", view.first + view.norms_first,
             " on, or compress before the sequence is longer than that"));
}

// Selects, from the observed queries, those of the newest tokens and the counts.semantic queries of
// largest norm. A query that is both is used once.
absl::StatusOr<Observers> ObserversOf(const LayerView& view, std::uint32_t head,
                                      const Counts& counts) {
  const auto newest = NewestQueries(kSemanticKvName, view, head, counts.recent);
  if (!newest.ok()) return newest.status();
  const auto all = QueriesOf(kSemanticKvName, view, head);
  const auto index_of = [&](std::uint64_t position) {
    return static_cast<std::uint64_t>(std::ranges::lower_bound(all->positions, position) -
                                      all->positions.begin());
  };
  // Queries of tokens after the view do not score.
  const std::uint64_t there = index_of(view.tokens);
  const std::uint64_t compared = index_of(view.norms_first);
  if (there - compared < counts.semantic) {
    return Missing(kSemanticKvName,
                   Concat(counts.semantic - (there - compared), " of the ", counts.semantic,
                          " queries of largest norm of head ", head, " have"));
  }
  const std::size_t row_bytes = RowBytes(view);
  Scores lengths;
  for (std::uint64_t i = compared; i < there; ++i) {
    lengths.push_back(kernels::SquaredLength(all->rows.rows + i * row_bytes, view.geometry.head_dim,
                                             view.geometry.type));
  }
  const std::vector<std::uint32_t> longest = kernels::TopIndices(lengths, counts.semantic);
  Observers observers;
  for (std::uint64_t i = 0; i < there; ++i) {
    const bool recent = all->positions[i] + counts.recent >= view.tokens;
    const bool strong = i >= compared && std::ranges::binary_search(longest, i - compared);
    if (!recent && !strong) continue;
    observers.positions.push_back(all->positions[i]);
    const std::byte* const row = all->rows.rows + i * row_bytes;
    observers.rows.insert(observers.rows.end(), row, row + row_bytes);
  }
  return observers;
}

// For each entry of the lane, the average attention of one head's observers.
absl::StatusOr<Scores> HeadScores(const SemanticKvPolicy& semantic, const LayerView& view,
                                  std::uint32_t head, const Counts& counts) {
  const std::uint32_t kv_head = head / view.geometry.group();
  const LaneEntries& lane = view.lanes[kv_head];
  const auto observers = ObserversOf(view, head, counts);
  if (!observers.ok()) return observers.status();
  const std::vector<std::uint64_t>& positions = observers->positions;
  Scores paid(lane.count);
  kernels::KeyObservation look = {.queries = observers->span(),
                                  .log2_weights = kernels::Log2Weights(lane.weights),
                                  .sums = paid};
  look.visible = semantic.causal ? kernels::CausalRanges(positions, lane.positions,
                                                         view.geometry.sliding_window)
                                 : kernels::FullRanges(positions.size(), lane.count);
  absl::Status status = view.scorer->Look(kv_head, std::span(&look, 1));
  if (!status.ok()) return status;
  for (std::uint64_t i = 0; i < lane.count; ++i) {
    // The number of observers at or after the entry.
    const auto after = positions.end() - std::ranges::lower_bound(positions, lane.positions[i]);
    const auto by = semantic.norm_visible ? after : std::ssize(positions);
    if (by != 0) paid[i] /= static_cast<double>(by);
  }
  return paid;
}

void Join(Aggregate aggregate, std::uint32_t group, const Scores& of_head, Scores& scores) {
  if (scores.empty()) {
    scores = of_head;
    if (aggregate == Aggregate::kMean) {
      for (double& score : scores) score /= group;
    }
    return;
  }
  for (std::size_t i = 0; i < scores.size(); ++i) {
    if (aggregate == Aggregate::kMax) {
      scores[i] = std::max(scores[i], of_head[i]);
    } else {
      scores[i] += aggregate == Aggregate::kMean ? of_head[i] / group : of_head[i];
    }
  }
}

absl::StatusOr<LayerDecision> DecideSemantic(SemanticKvPolicy semantic, const LayerView& view) {
  // Sinks are the first tokens of the sequence, not of every prompt.
  semantic.sink -= std::min(semantic.sink, view.first);
  const Counts counts(semantic, view);
  const absl::Status known = CheckKnown(view, semantic.lambda, counts.semantic);
  const std::uint32_t group = view.geometry.group();
  LayerDecision decision;
  for (std::uint32_t kv_head = 0; kv_head < view.lanes.size(); ++kv_head) {
    const LaneEntries& lane = view.lanes[kv_head];
    if (lane.count <= counts.kept(semantic)) {
      decision.push_back(KeepAll(lane));
      continue;
    }
    if (!known.ok()) return known;
    Scores scores;
    for (std::uint32_t i = 0; i < group; ++i) {
      const auto of_head = HeadScores(semantic, view, kv_head * group + i, counts);
      if (!of_head.ok()) return of_head.status();
      Join(semantic.aggregate, group, *of_head, scores);
    }
    const auto between = std::span<const double>(scores).subspan(
        semantic.sink, lane.count - semantic.sink - counts.recent);
    decision.push_back(KeepBetween(lane, semantic.sink, counts.recent, counts.middle, between));
  }
  return decision;
}

// ---- The registry row

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
     .help = "Share of each head's queries, those of largest norm, that score the tokens together "
             "with the newest queries"},
    {.name = "recent_ratio",
     .type = OptionType::kNumber,
     .standard = "0.01",
     .unit = "share",
     .help = "Share of the tokens, the newest, that are always kept; at least one token"},
    {.name = "sink",
     .type = OptionType::kCount,
     .standard = "256",
     .most = kMostPinned,
     .unit = "tokens",
     .help = "Number of first tokens to keep"},
    {.name = kKeepTotal,
     .type = OptionType::kNumber,
     .standard = "0.2",
     .above_least = true,
     .unit = "share",
     .help = "Share of the tokens to keep, including the first and the newest; not together with "
             "keep_middle"},
    {.name = kKeepMiddle,
     .type = OptionType::kNumber,
     .unit = "share",
     .help = "Share of the tokens between the first and the newest to keep; replaces keep_total"},
    {.name = "mask",
     .type = OptionType::kWord,
     .standard = "causal",
     .words = kMaskWords,
     .help = "Whether queries attend only to earlier tokens, or to all tokens as in NACL"},
    {.name = "norm",
     .type = OptionType::kWord,
     .standard = "fixed",
     .words = kNormWords,
     .help = "Whether a token's attention is divided by the number of all scoring queries, or only "
             "of those after it"},
    {.name = "agg",
     .type = OptionType::kWord,
     .standard = "mean",
     .words = kAggregateWords,
     .help = "How the scores of a kv head's query heads are combined"},
};

std::string Check(const Term& term, std::span<const Term>) {
  if (term.values.given(kKeepTotal) && term.values.given(kKeepMiddle)) {
    return "keep_total and keep_middle are both given; give only one of them";
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
        "Keeps the first and the newest tokens of a prompt, and those that the queries of largest "
        "norm attend to most",
    .sets = "tokens, once at the end of a prompt, separately for each kv head",
    .paper = "SemanticKV (Huang et al., A Semantics-Driven KV Cache Eviction Framework)",
    .decides = Decides::kTokens,
    .options = kOptions,
    .check = Check,
    .apply = Apply,
    .read = Read,
    .tokens = &kSystem,
};

}  // namespace tessera::policies
