// H2O: keeps the heavy hitters, which received most attention from all queries so far, and the
// newest tokens. Each kv head decides separately. Attention is summed over the queries of prompts
// and decoded tokens, including a token's own query, and averaged over the query heads.
#include <algorithm>

#include "daemon/base/strings.h"
#include "daemon/policies/registry_rows.h"
#include "daemon/policies/token_system.h"
#include "daemon/policies/tokens/shared/keep.h"
#include "daemon/policies/tokens/shared/observed_prompt.h"
#include "daemon/policies/tokens/shared/token_budget.h"

namespace tessera::policies {
namespace {

constexpr std::string_view kName = "h2o";

constexpr Option kOptions[] = {
    {.name = "heavy",
     .type = OptionType::kCount,
     .standard = "1024",
     .least = 1,
     .most = kMostEntries,
     .unit = "tokens",
     .help = "Number of tokens to keep because they received most attention"},
    {.name = "recent",
     .type = OptionType::kCount,
     .standard = "1024",
     .least = 1,
     .most = kMostEntries,
     .unit = "tokens",
     .help = "Number of newest tokens to keep"},
};

void Apply(const Values& values, Policy& policy) {
  policy.tokens = H2oPolicy{.heavy = values.Count("heavy"), .recent = values.Count("recent")};
}

std::optional<Values> Read(const Policy& policy) {
  const auto* const h2o = TokensOf<H2oPolicy>(policy);
  if (h2o == nullptr) return std::nullopt;
  Values values(kOptions);
  values.Give("heavy", static_cast<double>(h2o->heavy));
  values.Give("recent", static_cast<double>(h2o->recent));
  return values;
}

Needs NeedsFrom(const TokenPolicy&) { return {.attention_sums = true, .decode_queries = true}; }

// Entries of a lane, each with the attention that it has received. Scores are fp32, like the
// remembered ones, so that the result does not depend on how many tokens one call advances. (Only
// the last bits of a step with several queries may differ: the device adds those in fp32.)
struct Hitters {
  std::vector<std::uint32_t> entries;
  std::vector<float> scores;

  void Evict(const H2oPolicy& h2o) {
    if (entries.size() <= h2o.heavy + h2o.recent) return;
    const LaneEntries all = {.count = entries.size()};
    const std::vector<double> old(scores.begin(),
                                  scores.end() - static_cast<std::ptrdiff_t>(h2o.recent));
    const LaneDecision kept = KeepBetween(all, 0, h2o.recent, h2o.heavy, old);
    for (std::size_t i = 0; i < kept.kept.size(); ++i) {
      entries[i] = entries[kept.kept[i]];
      scores[i] = scores[kept.kept[i]];
    }
    entries.resize(kept.kept.size());
    scores.resize(kept.kept.size());
  }
};

// The remembered scores of a lane whose first `held` entries were decided about. There may be more,
// if the sequence was truncated since.
absl::StatusOr<std::vector<float>> Remembered(const LayerMemory& memory, std::size_t lane,
                                              std::uint64_t held) {
  std::vector<float> scores;
  if (lane < memory.scores.size()) scores = memory.scores[lane];
  if (scores.size() < held) {
    return Missing(
        kName, Concat("sums of attention of kv head ", lane, " up to its entry ", held, " have"));
  }
  scores.resize(held);
  return scores;
}

// Adds the attention of entries [first, end), which came in one forward step. A single decoded
// token is scored in double, among the entries that are still held.
absl::Status Pay(const LayerView& view, std::uint32_t lane, std::uint64_t first, std::uint64_t end,
                 Hitters& hitters) {
  const std::size_t before = hitters.entries.size();
  for (std::uint64_t i = first; i < end; ++i) {
    hitters.entries.push_back(static_cast<std::uint32_t>(i));
    hitters.scores.push_back(0);
  }
  const double part = 1.0 / view.geometry.group();
  std::vector<double> paid(hitters.entries.size());
  absl::Status status =
      end - first == 1 ? AddSharesAt(kName, view, lane, view.lanes[lane].positions[first],
                                     static_cast<std::uint32_t>(first), hitters.entries, part, paid)
                       : AddSharesOfStep(kName, view, lane, first, end,
                                         std::span(hitters.entries).first(before), part, paid);
  if (!status.ok()) return status;
  for (std::size_t i = 0; i < paid.size(); ++i) {
    hitters.scores[i] = static_cast<float>(hitters.scores[i] + paid[i]);
  }
  return absl::OkStatus();
}

// Replays the entries of a lane from `from` on, one forward step after another.
absl::Status GoOn(const H2oPolicy& h2o, const LayerView& view, std::uint32_t lane,
                  std::uint64_t from, Hitters& hitters) {
  const LaneEntries& entries = view.lanes[lane];
  for (std::uint64_t i = from; i < entries.count;) {
    const std::uint64_t behind = view.StepEnd(entries.positions[i]);
    std::uint64_t end = i;
    while (end < entries.count && entries.positions[end] < behind) ++end;
    if (absl::Status status = Pay(view, lane, i, end, hitters); !status.ok()) return status;
    i = end;
    hitters.Evict(h2o);
  }
  return absl::OkStatus();
}

absl::StatusOr<LayerDecision> DecideLayer(const TokenPolicy& tokens, const LayerView& view,
                                          LayerMemory& memory) {
  const auto& h2o = std::get<H2oPolicy>(tokens);
  LayerDecision decision;
  std::vector<std::vector<float>> scores;
  for (std::uint32_t h = 0; h < view.lanes.size(); ++h) {
    const std::uint64_t count = view.lanes[h].count;
    const std::uint64_t shown = h < view.sums.size() ? view.sums[h].size() : 0;
    // A worker that continues the sequence has not seen the earlier keys: it sends queries for the
    // tokens after those that the sums cover.
    if (shown == 0 && count > 0) {
      return Missing(
          kName, Concat("sums of attention of kv head ", h, " for its ", count, " entries have"));
    }
    Hitters hitters = {.entries = Indices(0, shown), .scores = std::vector<float>(shown)};
    for (std::uint64_t i = 0; i < shown; ++i) hitters.scores[i] = view.sums[h][i];
    if (h < memory.scores.size()) {
      const std::size_t known = std::min(memory.scores[h].size(), hitters.scores.size());
      for (std::size_t i = 0; i < known; ++i) hitters.scores[i] += memory.scores[h][i];
    }
    const std::span<const std::uint64_t> at = view.lanes[h].positions;
    if (shown == count || view.StepEnd(at[shown - 1]) <= at[shown]) hitters.Evict(h2o);
    if (absl::Status status = GoOn(h2o, view, h, shown, hitters); !status.ok()) return status;
    decision.push_back({.kept = std::move(hitters.entries)});
    scores.push_back(std::move(hitters.scores));
  }
  memory.scores = std::move(scores);
  return decision;
}

absl::StatusOr<LayerDecision> AdvanceLayer(const TokenPolicy& tokens, const LayerView& view,
                                           std::span<const std::uint64_t> held,
                                           LayerMemory& memory) {
  const auto& h2o = std::get<H2oPolicy>(tokens);
  LayerDecision decision;
  std::vector<std::vector<float>> scores;
  for (std::uint32_t lane = 0; lane < view.lanes.size(); ++lane) {
    auto remembered = Remembered(memory, lane, held[lane]);
    if (!remembered.ok()) return remembered.status();
    Hitters hitters = {.entries = Indices(0, held[lane]), .scores = *std::move(remembered)};
    if (absl::Status status = GoOn(h2o, view, lane, held[lane], hitters); !status.ok()) {
      return status;
    }
    decision.push_back({.kept = std::move(hitters.entries)});
    scores.push_back(std::move(hitters.scores));
  }
  memory.scores = std::move(scores);
  return decision;
}

constexpr TokenSystem kSystem = {
    .is = Is<H2oPolicy>, .needs = NeedsFrom, .decide = DecideLayer, .advance = AdvanceLayer};

}  // namespace

constexpr TermKind kH2o = {
    .name = kName,
    .is = "Keeps the tokens that all queries so far attended to most, and the newest tokens",
    .sets = "tokens, also while decoding, separately for each kv head",
    .paper = "H2O (arXiv 2306.14048)",
    .decides = Decides::kTokens,
    .options = kOptions,
    .apply = Apply,
    .read = Read,
    .tokens = &kSystem,
};

}  // namespace tessera::policies
