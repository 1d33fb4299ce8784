// ThinK: drops the key channels with the smallest products of query and key energy, from every
// token but the newest. Each kv head drops its own channels. Values are unchanged.
//
// A channel's score is the mean of its squared queries, averaged over the query heads of the kv
// head, times the mean of its squared keys. Keys and queries count as stored, after RoPE. Ties keep
// the lower channel. The first prompt that is longer than recent_size fixes a lane's channels, also
// for later prompts and decoded tokens; if all rows with dropped channels are truncated, the next
// prompt decides anew. A token policy chooses on whole keys first, and channels are scored on all
// of them; the newest of its kept tokens keep all channels for good. Each lane stores one row of
// the identity matrix per kept channel, by which queries are reduced.
#include <algorithm>
#include <array>
#include <string>

#include "absl/status/status.h"
#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "daemon/policies/channels/key_channels.h"
#include "daemon/policies/plan.h"
#include "daemon/policies/registry_rows.h"
#include "daemon/policies/tokens/shared/observed_prompt.h"
#include "kernels/tokens/channels.h"
#include "kernels/tokens/top.h"

namespace tessera::policies {
namespace {

constexpr std::string_view kName = "think";
// One channel of rows with the largest head_dim.
constexpr double kLeastRatio = 1.0 / 256;

constexpr Option kOptions[] = {
    {.name = "ratio",
     .type = OptionType::kNumber,
     .standard = "0.4",
     .least = kLeastRatio,
     .most = 1 - kLeastRatio,
     .unit = "share",
     .help = "Share of the key channels to drop, rounded down to whole channels"},
    {.name = "recent_size",
     .type = OptionType::kCount,
     .standard = "32",
     .most = 65536,
     .unit = "tokens",
     .help = "Number of newest tokens that keep all key channels; while decoding, up to a tile "
             "more"},
    {.name = "window",
     .type = OptionType::kCount,
     .standard = "32",
     .least = 1,
     .most = 4096,
     .unit = "tokens",
     .help = "Number of newest prompt tokens whose queries score the channels"},
};

// Token policies decide before channels are dropped, and must not change the entries afterwards.
std::string Check(const Term&, std::span<const Term> all) {
  for (const Term& other : all) {
    if (other.kind->decides == Decides::kSelection) {
      return Concat("rows with dropped key channels have no block summaries, which ",
                    other.kind->name, " needs");
    }
    if (other.kind->decides != Decides::kTokens) continue;
    Policy alone;
    other.kind->apply(other.values, alone);
    if (Continues(alone)) {
      return Concat(
          other.kind->name,
          " drops tokens while decoding, but key channels are dropped once, at the end of a "
          "prompt");
    }
    if (DecidesFor(alone, 1) != 1) {
      return Concat("layers that share a decision of ", other.kind->name,
                    " have no observed queries of their own to score channels by");
    }
  }
  return "";
}

void Apply(const Values& values, Policy& policy) {
  policy.key_channels = KeyChannelPolicy{.ratio = values.Number("ratio"),
                                         .recent = values.Count("recent_size"),
                                         .window = values.Count32("window")};
}

std::optional<Values> Read(const Policy& policy) {
  if (!policy.key_channels.has_value()) return std::nullopt;
  Values values(kOptions);
  values.Give("ratio", policy.key_channels->ratio);
  values.Give("recent_size", static_cast<double>(policy.key_channels->recent));
  values.Give("window", policy.key_channels->window);
  return values;
}

// By kv head: the sum of each channel's squares over the window's queries and the query heads. Sums
// order the channels as means would.
absl::StatusOr<std::vector<std::vector<double>>> QuerySquares(const Policy& policy,
                                                              const LayerView& view) {
  const kernels::LayerGeometry& geometry = view.geometry;
  const std::uint64_t window = std::min<std::uint64_t>(policy.key_channels->window, view.tokens);
  std::vector<std::vector<double>> sums(geometry.kv_heads, std::vector<double>(geometry.head_dim));
  for (std::uint32_t head = 0; head < geometry.query_heads; ++head) {
    const absl::StatusOr<ObservedQueries> queries = NewestQueries(kName, view, head, window);
    if (!queries.ok()) return queries.status();
    kernels::AddChannelSquares(queries->rows.rows, queries->rows.count, geometry.head_dim,
                               geometry.type, sums[head / geometry.group()]);
  }
  return sums;
}

}  // namespace

absl::StatusOr<ChannelDecision> DecideKeyChannels(const Policy& policy, const LayerView& view) {
  TESSERA_CHECK(policy.key_channels.has_value(), policy.text);
  absl::StatusOr<std::vector<std::vector<double>>> scores = QuerySquares(policy, view);
  if (!scores.ok()) return scores.status();
  const kernels::LayerGeometry& geometry = view.geometry;
  const std::uint32_t kept = KeptKeyChannels(*policy.key_channels, geometry.head_dim);
  ChannelDecision decision;
  for (std::size_t lane = 0; lane < view.lanes.size(); ++lane) {
    std::vector<double> keys(geometry.head_dim);
    absl::Status status = view.scorer->AddChannelSquares(static_cast<std::uint32_t>(lane),
                                                         view.lanes[lane].count, keys);
    if (!status.ok()) return status;
    std::vector<double>& score = (*scores)[lane];
    for (std::size_t d = 0; d < score.size(); ++d) score[d] *= keys[d];
    decision.push_back(kernels::TopIndices(score, kept));
  }
  return decision;
}

constexpr TermKind kThink = {
    .name = kName,
    .is =
        "Drops the key channels that contribute least to the attention of a prompt's newest "
        "queries; the newest keys and all values are unchanged",
    .sets = "packing (of keys, once at the end of a prompt, separately for each kv head)",
    .paper = "ThinK (arXiv 2407.21018)",
    .decides = Decides::kPacking,
    .options = kOptions,
    .check = Check,
    .apply = Apply,
    .read = Read,
};

}  // namespace tessera::policies
