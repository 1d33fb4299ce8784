// SemantiCache: merges entries with similar keys within a chunk of text. A merged entry has the
// mean of their rows, the number of their tokens as its weight, and the position of the first.
// tokens/shared/text_chunks.h says where chunks end. Delimiters are never merged.
// A budget covers all kv heads of a layer and all tokens, dropped ones too. Nothing is merged while
// decoding. With key_space=pre keys are compared and averaged without their RoPE rotation.
#include <algorithm>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/base/strings.h"
#include "daemon/policies/registry_rows.h"
#include "daemon/policies/token_system.h"
#include "daemon/policies/tokens/shared/cluster.h"
#include "daemon/policies/tokens/shared/keep.h"
#include "daemon/policies/tokens/shared/observed_prompt.h"
#include "daemon/policies/tokens/shared/text_chunks.h"
#include "daemon/policies/tokens/shared/token_budget.h"
#include "daemon/policies/tokens/shared/window_scores.h"
#include "kernels/tokens/counts.h"

namespace tessera::policies {
namespace {

constexpr std::string_view kSemantiCacheName = "semanticache";

// ---- The decision about a layer

bool IsDelimiter(std::span<const TextMark> text, std::uint64_t token) {
  return token < text.size() && text[token] == TextMark::kDelimiter;
}

// The positions of the view's delimiters; empty if the policy ignores them.
std::vector<std::uint64_t> DelimitersOf(const SemantiCachePolicy& cache, const LayerView& view) {
  std::vector<std::uint64_t> delimiters;
  for (std::uint64_t token = 0; cache.delimiters && token < view.tokens; ++token) {
    if (IsDelimiter(view.text, token)) delimiters.push_back(token);
  }
  return delimiters;
}

struct Runs {
  std::vector<EntryRun> of;
  std::uint64_t open = 0;  // entries of the open chunk, which may be merged when it ends
  // The first position whose entry is in no run but may be in a later one; all ones: none.
  std::uint64_t next = ~std::uint64_t{0};
};

// The entries of a lane that may be merged: each chunk without its delimiter, sinks and newest
// entries. Chunks before the position `settled` are skipped.
Runs RunsOf(const LaneEntries& lane, const SemantiCachePolicy& cache, bool leave_open,
            const TextChunks& chunks, std::span<const std::uint64_t> delimiters,
            std::uint64_t settled) {
  Runs runs;
  const std::uint64_t most = lane.count - std::min(lane.count, cache.recent);
  const auto inside = [&](const EntryRun& chunk) {
    EntryRun run = {.begin = std::max(chunk.begin, cache.sink), .end = std::min(chunk.end, most)};
    run.end = std::max(run.begin, run.end);
    return run;
  };
  if (most < lane.count) runs.next = lane.positions[most];
  for (EntryRun chunk : chunks.ended) {
    if (chunk.end < lane.count && lane.positions[chunk.end] <= settled) continue;
    // A delimiter is its chunk's last entry.
    if (std::ranges::binary_search(delimiters, lane.positions[chunk.end - 1])) --chunk.end;
    const EntryRun run = inside(chunk);
    if (run.begin < run.end) runs.of.push_back(run);
  }
  const EntryRun open = inside(chunks.open);
  if (leave_open) {
    runs.open = open.end - open.begin;
    if (chunks.open.begin < lane.count) {
      runs.next = std::min(runs.next, lane.positions[chunks.open.begin]);
    }
  } else if (open.begin < open.end) {
    runs.of.push_back(open);
  }
  return runs;
}

// What is clustered together: one lane, or all lanes of a layer.
struct Cluster {
  std::vector<std::uint32_t> kv_heads;
  Runs runs;
  std::uint64_t entries = 0;
  ChunkEnds boundaries;  // of each of its lanes, after the decision

  std::uint64_t OutsideRuns() const {
    std::uint64_t outside = entries;
    for (const EntryRun& run : runs.of) outside -= run.end - run.begin;
    return outside;
  }
};

// The remembered boundaries of these lanes, merged. With scope=layer all lanes have the same list,
// unless an earlier policy has left different ones.
std::vector<std::uint64_t> BoundariesOf(const LayerMemory& memory,
                                        std::span<const std::uint32_t> kv_heads) {
  std::vector<std::uint64_t> all;
  if (memory.boundaries.empty()) return all;
  for (const std::uint32_t kv_head : kv_heads) {
    const ChunkEnds& of_lane = memory.boundaries[kv_head];
    all.insert(all.end(), of_lane.begin(), of_lane.end());
  }
  std::ranges::sort(all);
  all.erase(std::ranges::unique(all).begin(), all.end());
  return all;
}

// `again`: includes chunks that have been clustered before.
std::vector<Cluster> ClustersOf(const SemantiCachePolicy& cache, const LayerView& view,
                                const LayerMemory& memory, bool again) {
  const std::uint64_t settled = again ? 0 : memory.clustered_until;
  const std::vector<std::uint64_t> delimiters = DelimitersOf(cache, view);
  const ChunkRules rules = {
      .most_entries = cache.max_chunk, .delimiters = delimiters, .first = view.first};
  const bool leave_open = cache.leave_open || view.decoded() > 0;
  std::vector<Cluster> clusters;
  for (std::uint32_t kv_head = 0; kv_head < view.lanes.size(); ++kv_head) {
    if (clusters.empty() || cache.scope == Scope::kHead) clusters.emplace_back();
    clusters.back().kv_heads.push_back(kv_head);
  }
  for (Cluster& cluster : clusters) {
    // The lanes have equal entries in the view, but maybe not before it.
    LaneEntries lane = view.lanes[cluster.kv_heads.front()];
    for (const std::uint32_t kv_head : cluster.kv_heads) {
      lane.before = std::max(lane.before, view.lanes[kv_head].before);
    }
    TextChunks chunks = ChunksOf(lane, rules, BoundariesOf(memory, cluster.kv_heads));
    cluster.runs = RunsOf(lane, cache, leave_open, chunks, delimiters,
                          settled - std::min(settled, view.first));
    cluster.entries = lane.count;
    cluster.boundaries = ChunkEnds(std::move(chunks.boundaries));
  }
  return clusters;
}

LaneDecision Merged(std::span<const std::uint32_t> seed_of) {
  std::vector<std::uint32_t> sizes(seed_of.size());
  for (const std::uint32_t seed : seed_of) ++sizes[seed];
  LaneDecision decision = {.kept = {}, .begins = {0}, .members = {}};
  std::vector<std::uint32_t> next(seed_of.size());  // by seed: index for its next member
  for (std::uint32_t i = 0; i < seed_of.size(); ++i) {
    if (seed_of[i] != i) continue;
    decision.kept.push_back(i);
    next[i] = decision.begins.back();
    decision.begins.push_back(next[i] + sizes[i]);
  }
  decision.members.resize(seed_of.size());
  for (std::uint32_t i = 0; i < seed_of.size(); ++i) decision.members[next[seed_of[i]]++] = i;
  return decision;
}

absl::StatusOr<LaneDecision> DecideCluster(const Cluster& cluster, const LayerView& view,
                                           double tau) {
  absl::StatusOr<KeyCosines> cosines =
      KeyCosines::Of(*view.scorer, cluster.kv_heads, cluster.entries);
  if (!cosines.ok()) return cosines.status();
  std::vector<std::uint32_t> seed_of = Indices(0, cluster.entries);
  for (const EntryRun& run : cluster.runs.of) {
    absl::Status status = ClusterRun(*cosines, run.begin, run.end, tau,
                                     std::span(seed_of).subspan(run.begin, run.end - run.begin));
    if (!status.ok()) return status;
  }
  // Nothing was merged: return a decision without members.
  if (seed_of == Indices(0, cluster.entries)) return LaneDecision{.kept = std::move(seed_of)};
  return Merged(seed_of);
}

// For each tau of the grid, the number of entries that remain in all lanes of the layer.
absl::StatusOr<std::vector<std::uint64_t>> EntriesByTau(std::span<const Cluster> clusters,
                                                        const LayerView& view) {
  std::vector<std::uint64_t> totals(kTauSteps + 1);
  for (const Cluster& cluster : clusters) {
    absl::StatusOr<KeyCosines> cosines =
        KeyCosines::Of(*view.scorer, cluster.kv_heads, cluster.entries);
    if (!cosines.ok()) return cosines.status();
    ClusterCounts counts;
    counts.AddSingle(cluster.OutsideRuns());
    for (const EntryRun& run : cluster.runs.of) {
      absl::Status status = counts.AddRun(*cosines, run.begin, run.end);
      if (!status.ok()) return status;
    }
    for (std::size_t step = 0; step < totals.size(); ++step) {
      totals[step] += counts.counts()[step] * cluster.kv_heads.size();
    }
  }
  return totals;
}

// The number of entries before the view, in all lanes.
std::uint64_t EntriesBefore(const LayerView& view) {
  std::uint64_t before = 0;
  for (const LaneEntries& lane : view.lanes) before += lane.before;
  return before;
}

// The budget in entries, for all lanes together. What earlier prompts have left over is added,
// because the sinks and newest tokens of a short prompt alone may exceed its share.
std::uint64_t MostEntries(double budget, const LayerView& view) {
  const auto lanes = static_cast<double>(view.lanes.size());
  const std::uint64_t before = EntriesBefore(view);
  const std::uint64_t in_sight =
      kernels::CountDown(budget * static_cast<double>(view.tokens) * lanes);
  const std::uint64_t in_all =
      kernels::CountDown(budget * static_cast<double>(view.first + view.tokens) * lanes);
  return std::max(in_sight, in_all - std::min(in_all, before));
}

// The largest tau whose entries are within the budget. A larger tau may leave fewer entries, so all
// are tried. While decoding, the open chunk cannot be merged; if the other entries are within the
// budget, the tau that leaves fewest is taken.
absl::StatusOr<double> TauFor(double budget, std::span<const Cluster> clusters,
                              const LayerView& view, std::uint64_t pinned) {
  const std::uint64_t most = MostEntries(budget, view);
  const absl::StatusOr<std::vector<std::uint64_t>> totals = EntriesByTau(clusters, view);
  if (!totals.ok()) return totals.status();
  for (std::size_t step = totals->size(); step-- > 0;) {
    if ((*totals)[step] <= most) return static_cast<double>(step) / kTauSteps;
  }
  const std::uint64_t least = std::ranges::min(*totals);
  std::uint64_t open = 0;
  for (const Cluster& cluster : clusters) {
    if (view.decoded() > 0) open += cluster.runs.open * cluster.kv_heads.size();
  }
  if (least - open <= most) {
    const auto last = std::find(totals->rbegin(), totals->rend(), least);
    return static_cast<double>(totals->rend() - last - 1) / kTauSteps;
  }
  constexpr double kSteps = 10000;
  const auto lanes = static_cast<double>(view.lanes.size());
  const auto share = [&](std::uint64_t entries, std::uint64_t tokens) {
    const double exact = static_cast<double>(entries) / (static_cast<double>(tokens) * lanes);
    return static_cast<double>(kernels::CountUp(exact * kSteps)) / kSteps;
  };
  const std::uint64_t before = EntriesBefore(view);
  const double enough = std::min(share(least - open, view.tokens),
                                 share(least - open + before, view.first + view.tokens));
  absl::Status refusal = absl::InvalidArgumentError(Concat(
      kSemantiCacheName, ": budget ", budget, " of ", view.tokens, " tokens in ", view.lanes.size(),
      " kv heads is ", most, " entries",
      before == 0 ? "" : ", including what earlier tokens have left over",
      ", but no tau leaves fewer than ", least - open, open == 0 ? "" : " without the open chunk",
      "; a budget of ", enough, " is enough for this layer"));
  // Sinks and newest tokens are never merged. If they alone exceed the budget, more tokens help.
  if (pinned * view.lanes.size() > most) {
    const double enough_tokens = static_cast<double>(pinned) / budget;
    MarkLeavesWhole(refusal, kernels::CountUp(enough_tokens));
  }
  return refusal;
}

// The ends of chunks are unknown unless all token ids have been observed, including those of
// dropped tokens.
absl::Status CheckText(const LayerView& view) {
  for (std::uint64_t token = 0; token < view.tokens; ++token) {
    if (token < view.text.size() && view.text[token] != TextMark::kNotShown) continue;
    return Missing(kSemantiCacheName, Concat("the id of token ", view.first + token, " has"));
  }
  return absl::OkStatus();
}

absl::StatusOr<LayerDecision> DecideClusters(SemantiCachePolicy cache, const LayerView& view,
                                             LayerMemory& memory) {
  // Sinks are the first tokens of the sequence, not of every prompt.
  cache.sink -= std::min(cache.sink, view.first);
  // A short prompt is kept whole, whatever the budget.
  if (KeepsEverything(view, cache.sink + cache.recent)) return KeepAll(view);
  if (cache.delimiters) {
    if (absl::Status status = CheckText(view); !status.ok()) return status;
  }
  if (cache.scope == Scope::kLayer) {
    if (absl::Status status = CheckEqualLanes(kSemantiCacheName, view); !status.ok()) {
      return status;
    }
  }
  std::vector<Cluster> clusters = ClustersOf(cache, view, memory, /*again=*/false);
  double tau = cache.tau;
  if (cache.budget.has_value()) {
    const std::uint64_t pinned = cache.sink + cache.recent;
    absl::StatusOr<double> fitting = TauFor(*cache.budget, clusters, view, pinned);
    if (!fitting.ok() && memory.clustered_until > 0) {
      // The budget covers all tokens: merge more of the older ones.
      clusters = ClustersOf(cache, view, memory, /*again=*/true);
      fitting = TauFor(*cache.budget, clusters, view, pinned);
    }
    if (!fitting.ok()) return fitting.status();
    tau = *fitting;
  }
  LayerDecision decision;
  for (const Cluster& cluster : clusters) {
    absl::StatusOr<LaneDecision> of_cluster = DecideCluster(cluster, view, tau);
    if (!of_cluster.ok()) return of_cluster.status();
    decision.push_back(*std::move(of_cluster));
  }
  memory.clustered_until = view.first + view.tokens;
  memory.boundaries.resize(view.lanes.size());
  for (const Cluster& cluster : clusters) {
    if (cluster.runs.next < view.tokens) {
      memory.clustered_until = std::min(memory.clustered_until, view.first + cluster.runs.next);
    }
    for (const std::uint32_t kv_head : cluster.kv_heads) {
      // An equal list is kept, because forks may share its memory.
      ChunkEnds& of_lane = memory.boundaries[kv_head];
      if (of_lane != cluster.boundaries) of_lane = cluster.boundaries;
    }
  }
  if (cache.scope == Scope::kLayer) return LayerDecision(view.lanes.size(), decision.front());
  return decision;
}

// ---- The registry row

constexpr std::string_view kTau = "tau";
constexpr std::string_view kKeySpace = "key_space";
constexpr std::string_view kKeySpaceWords[] = {"post", "pre"};  // by KeySpace

constexpr Option kOptions[] = {
    {.name = kTau,
     .type = OptionType::kNumber,
     .standard = "0.7",
     .help = "Cosine with the first key of a cluster above which a key joins it; not together with "
             "budget"},
    {.name = kBudget,
     .type = OptionType::kNumber,
     .above_least = true,
     .unit = "share",
     .help = "Largest share of a layer's tokens to keep as entries, by the largest tau that "
             "achieves it; replaces tau"},
    {.name = "scope",
     .type = OptionType::kWord,
     .standard = "head",
     .words = kScopeWords,
     .help = "Whether each kv head clusters its own keys, or a layer clusters the concatenated "
             "keys of all its kv heads"},
    {.name = "delimiters",
     .type = OptionType::kSwitch,
     .standard = "1",
     .help = "Whether chunks of text end at the model's delimiters, which are never merged"},
    {.name = "max_chunk",
     .type = OptionType::kCount,
     .standard = "256",
     .least = 1,
     .most = kMostWindow,
     .unit = "entries",
     .help = "Largest number of entries in a chunk of text"},
    {.name = "sink",
     .type = OptionType::kCount,
     .standard = "4",
     .most = kMostPinned,
     .unit = "tokens",
     .help = "Number of first tokens that are never merged; 0 in the paper"},
    {.name = "recent",
     .type = OptionType::kCount,
     .standard = "32",
     .most = kMostPinned,
     .unit = "tokens",
     .help = "Number of newest tokens that are not merged; 0 in the paper"},
    {.name = "leave_open",
     .type = OptionType::kSwitch,
     .standard = "0",
     .help = "Whether the last chunk of a prompt is not merged until it ends, as while decoding"},
    {.name = kKeySpace,
     .type = OptionType::kWord,
     .standard = "post",
     .words = kKeySpaceWords,
     .help =
         "Whether keys are compared and merged as stored (post), or with their rotary positions "
         "removed (pre)"},
};

// Checks the combination with a token policy, whose kept tokens are merged.
std::string CheckBeside(const Term& term, const Term& other) {
  Policy alone;
  other.kind->apply(other.values, alone);
  if (Continues(alone)) {
    return Concat(other.kind->name,
                  " drops tokens while decoding and counts entries, but a merged entry stands for "
                  "several tokens");
  }
  if (DecidesFor(alone, 1) != 1) {
    return Concat("layers that share a decision of ", other.kind->name,
                  " have different keys, so they cannot share a clustering");
  }
  if (ScopeOf(term.values.Word("scope")) == Scope::kLayer &&
      NeededLaneEquality(alone) != LaneEquality::kTokens) {
    return Concat("scope=layer needs the same tokens in all kv heads, but with ", other.kind->name,
                  " each keeps its own");
  }
  if (term.values.Word(kKeySpace) == "pre") {
    return Concat("key_space=pre removes the keys' rotary positions, but ", other.kind->name,
                  " scores keys as stored");
  }
  return "";
}

std::string Check(const Term& term, std::span<const Term> all) {
  if (term.values.given(kTau) && term.values.given(kBudget)) {
    return "tau and budget are both given; tau follows from the budget";
  }
  for (const Term& other : all) {
    if (other.kind->decides != Decides::kTokens) continue;
    if (std::string why = CheckBeside(term, other); !why.empty()) return why;
  }
  return "";
}

void Apply(const Values& values, Policy& policy) {
  SemantiCachePolicy cache = {
      .scope = ScopeOf(values.Word("scope")),
      .delimiters = values.Switch("delimiters"),
      .max_chunk = values.Count32("max_chunk"),
      .sink = values.Count("sink"),
      .recent = values.Count("recent"),
      .leave_open = values.Switch("leave_open"),
      .key_space = values.Word(kKeySpace) == "pre" ? KeySpace::kPre : KeySpace::kPost};
  if (values.given(kBudget)) {
    cache.budget = values.Number(kBudget);
  } else {
    cache.tau = values.Number(kTau);
  }
  policy.merging = cache;
}

std::optional<Values> Read(const Policy& policy) {
  const auto* const cache = MergingOf<SemantiCachePolicy>(policy);
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
  values.Give(kKeySpace, kKeySpaceWords[static_cast<std::size_t>(cache->key_space)]);
  return values;
}

Needs NeedsFrom(const TokenPolicy& tokens) {
  return {.token_ids = std::get<SemantiCachePolicy>(tokens).delimiters};
}

absl::StatusOr<LayerDecision> DecideLayer(const TokenPolicy& tokens, const LayerView& view,
                                          LayerMemory& memory) {
  return DecideClusters(std::get<SemantiCachePolicy>(tokens), view, memory);
}

bool TurnsBack(const TokenPolicy& tokens) {
  return std::get<SemantiCachePolicy>(tokens).key_space == KeySpace::kPre;
}

absl::Status CheckModel(const TokenPolicy& tokens, const ModelFacts& model) {
  if (!std::get<SemantiCachePolicy>(tokens).delimiters || model.delimiters) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      Concat("policy: ", kSemantiCacheName,
             ": chunks of text end at delimiters, but the model was registered without any; set "
             "ModelGeometry::delimiter_token_ids (DelimiterTokens() finds them by the tokens' "
             "texts), or use delimiters=0"));
}

LaneEquality WantsAlike(const TokenPolicy& tokens) {
  return std::get<SemantiCachePolicy>(tokens).scope == Scope::kLayer ? LaneEquality::kTokens
                                                                     : LaneEquality::kNothing;
}

constexpr TokenSystem kSystem = {.is = Is<SemantiCachePolicy>,
                                 .needs = NeedsFrom,
                                 .decide = DecideLayer,
                                 .lane_equality = WantsAlike,
                                 .uses_unrotated_keys = TurnsBack,
                                 .check_model = CheckModel};

}  // namespace

constexpr TermKind kSemantiCache = {
    .name = kSemantiCacheName,
    .is =
        "Merges tokens with similar keys, within a chunk of a prompt's text, into one entry with a "
        "weight",
    .sets =
        "merging, once at the end of a prompt, of the tokens that are kept; merged entries have "
        "weights",
    .paper = "SemantiCache (arXiv 2603.14303)",
    .decides = Decides::kMerging,
    .options = kOptions,
    .check = Check,
    .apply = Apply,
    .read = Read,
    .tokens = &kSystem,
};

}  // namespace tessera::policies
