#include <algorithm>

#include "absl/status/status.h"
#include "daemon/policies/cluster.h"
#include "daemon/policies/keep.h"
#include "daemon/policies/semanticache.h"
#include "daemon/policies/shown.h"
#include "kernels/tokens/counts.h"

namespace tessera::policies {
namespace {

// Which chunk of text each token belongs to. Chunks end behind a delimiter, where the policy looks
// at those, and after max_chunk tokens: counted in tokens, not in entries, so that the same cuts
// are found again when a prompt is followed by another and its entries have become fewer. Nothing
// is ever merged across one.
class Chunks {
 public:
  Chunks(const LayerView& view, const SemantiCachePolicy& cache)
      : text_(cache.delimiters ? view.text : std::span<const TextMark>()) {
    std::uint32_t chunk = 0;
    std::uint64_t begin = 0;
    of_.reserve(view.tokens + 1);
    for (std::uint64_t token = 0; token <= view.tokens; ++token) {
      if (token != begin && (token - begin) % cache.max_chunk == 0) ++chunk;
      of_.push_back(chunk);
      if (!IsDelimiter(token)) continue;
      ++chunk;
      begin = token + 1;
    }
  }

  bool IsDelimiter(std::uint64_t token) const {
    return token < text_.size() && text_[token] == TextMark::kDelimiter;
  }
  std::uint32_t Of(std::uint64_t token) const { return of_[token]; }
  // The one that the next token would belong to.
  std::uint32_t Open() const { return of_.back(); }

 private:
  const std::span<const TextMark> text_;
  std::vector<std::uint32_t> of_;
};

struct Run {
  std::uint64_t begin;
  std::uint64_t end;
};

// Entries of a lane that may be merged: of one chunk, without its delimiter, the sinks and the
// newest. Sinks and newest are counted in entries.
std::vector<Run> RunsOf(const LaneEntries& lane, const SemantiCachePolicy& cache,
                        const Chunks& chunks) {
  std::vector<Run> runs;
  const std::uint64_t end = lane.count - std::min(lane.count, cache.recent);
  std::uint64_t last_chunk = ~std::uint64_t{0};
  for (std::uint64_t i = std::min(lane.count, cache.sink); i < end; ++i) {
    const std::uint64_t position = lane.positions[i];
    const std::uint32_t chunk = chunks.Of(position);
    if (chunks.IsDelimiter(position)) continue;
    if (cache.leave_open && chunk == chunks.Open()) break;
    if (chunk != last_chunk) runs.push_back({.begin = i, .end = i});
    runs.back().end = i + 1;
    last_chunk = chunk;
  }
  return runs;
}

// What is clustered together: one lane, or all of a layer.
struct Cluster {
  std::vector<std::uint32_t> kv_heads;
  std::vector<Run> runs;
  std::uint64_t entries = 0;

  std::uint64_t OutsideRuns() const {
    std::uint64_t outside = entries;
    for (const Run& run : runs) outside -= run.end - run.begin;
    return outside;
  }
};

std::vector<Cluster> ClustersOf(const SemantiCachePolicy& cache, const LayerView& view) {
  const Chunks chunks(view, cache);
  std::vector<Cluster> clusters;
  for (std::uint32_t kv_head = 0; kv_head < view.lanes.size(); ++kv_head) {
    const LaneEntries& lane = view.lanes[kv_head];
    if (clusters.empty() || cache.scope == Scope::kHead) {
      clusters.push_back(
          {.kv_heads = {}, .runs = RunsOf(lane, cache, chunks), .entries = lane.count});
    }
    clusters.back().kv_heads.push_back(kv_head);
  }
  return clusters;
}

LaneDecision Merged(std::span<const std::uint32_t> seed_of) {
  std::vector<std::uint32_t> sizes(seed_of.size());
  for (const std::uint32_t seed : seed_of) ++sizes[seed];
  LaneDecision decision = {.kept = {}, .begins = {0}, .members = {}};
  std::vector<std::uint32_t> next(seed_of.size());  // of each seed, where its next member goes
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
  for (const Run& run : cluster.runs) {
    absl::Status status = ClusterRun(*cosines, run.begin, run.end, tau,
                                     std::span(seed_of).subspan(run.begin, run.end - run.begin));
    if (!status.ok()) return status;
  }
  // Where nothing has merged, every entry stands for itself.
  if (seed_of == Indices(0, cluster.entries)) return LaneDecision{.kept = std::move(seed_of)};
  return Merged(seed_of);
}

// Entries of the layer that stay, all lanes together, for each tau of the grid.
absl::StatusOr<std::vector<std::uint64_t>> EntriesByTau(std::span<const Cluster> clusters,
                                                        const LayerView& view) {
  std::vector<std::uint64_t> totals(kTauSteps + 1);
  for (const Cluster& cluster : clusters) {
    absl::StatusOr<KeyCosines> cosines =
        KeyCosines::Of(*view.scorer, cluster.kv_heads, cluster.entries);
    if (!cosines.ok()) return cosines.status();
    ClusterCounts counts;
    counts.AddSingle(cluster.OutsideRuns());
    for (const Run& run : cluster.runs) {
      absl::Status status = counts.AddRun(*cosines, run.begin, run.end);
      if (!status.ok()) return status;
    }
    for (std::size_t step = 0; step < totals.size(); ++step) {
      totals[step] += counts.counts()[step] * cluster.kv_heads.size();
    }
  }
  return totals;
}

// The largest tau whose entries are within the budget. A greater tau need not leave more entries,
// so that each is tried.
absl::StatusOr<double> TauFor(double budget, std::span<const Cluster> clusters,
                              const LayerView& view) {
  const double all = static_cast<double>(view.tokens) * static_cast<double>(view.lanes.size());
  const std::uint64_t most = kernels::CountDown(budget * all);
  const absl::StatusOr<std::vector<std::uint64_t>> totals = EntriesByTau(clusters, view);
  if (!totals.ok()) return totals.status();
  for (std::size_t step = totals->size(); step-- > 0;) {
    if ((*totals)[step] <= most) return static_cast<double>(step) / kTauSteps;
  }
  constexpr double kSteps = 10000;
  const std::uint64_t least = std::ranges::min(*totals);
  const double enough =
      static_cast<double>(kernels::CountUp(static_cast<double>(least) / all * kSteps)) / kSteps;
  return absl::InvalidArgumentError(
      Concat(kSemantiCacheName, ": budget ", budget, " of ", view.tokens, " tokens in ",
             view.lanes.size(), " kv heads is ", most, " entries, and no tau leaves less than ",
             least, "; a budget of ", enough, " is enough"));
}

// Where a chunk of text ends nobody knows while its tokens are not named.
absl::Status CheckText(const LayerView& view) {
  for (const LaneEntries& lane : view.lanes) {
    for (const std::uint64_t position : lane.positions) {
      if (position < view.text.size() && view.text[position] != TextMark::kNotShown) continue;
      return Missing(kSemantiCacheName, Concat("the id of token ", view.first + position, " has"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<LayerDecision> DecideClusters(const SemantiCachePolicy& cache,
                                             const LayerView& view) {
  if (cache.delimiters) {
    if (absl::Status status = CheckText(view); !status.ok()) return status;
  }
  if (cache.scope == Scope::kLayer) {
    if (absl::Status status = CheckEqualLanes(kSemantiCacheName, view); !status.ok()) {
      return status;
    }
  }
  const std::vector<Cluster> clusters = ClustersOf(cache, view);
  double tau = cache.tau;
  if (cache.budget.has_value()) {
    const absl::StatusOr<double> fitting = TauFor(*cache.budget, clusters, view);
    if (!fitting.ok()) return fitting.status();
    tau = *fitting;
  }
  LayerDecision decision;
  for (const Cluster& cluster : clusters) {
    absl::StatusOr<LaneDecision> of_cluster = DecideCluster(cluster, view, tau);
    if (!of_cluster.ok()) return of_cluster.status();
    decision.push_back(*std::move(of_cluster));
  }
  if (cache.scope == Scope::kLayer) return LayerDecision(view.lanes.size(), decision.front());
  return decision;
}

}  // namespace tessera::policies
