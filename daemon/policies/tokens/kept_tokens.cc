#include "daemon/policies/tokens/kept_tokens.h"

#include <algorithm>
#include <cmath>
#include <variant>

#include "daemon/policies/tokens/shared/token_budget.h"
#include "kernels/tokens/counts.h"

namespace tessera::policies {
namespace {

using kernels::CountDown;
using kernels::CountUp;

struct Counting {
  std::uint64_t tokens;

  KeptTokens Exactly(std::uint64_t count) const {
    return {.least = std::min(count, tokens), .most = std::min(count, tokens)};
  }
  absl::StatusOr<KeptTokens> ByBudget(const char* name, const EntryBudget& budget,
                                      std::uint64_t window) const {
    LayerView view;
    view.tokens = tokens;
    const absl::StatusOr<std::uint64_t> entries = EntriesOf(name, budget, view, window);
    if (!entries.ok()) return entries.status();
    return Exactly(*entries);
  }

  absl::StatusOr<KeptTokens> operator()(const ChunkKvPolicy& chunk) const {
    if (tokens <= chunk.window) return Exactly(tokens);
    if (!chunk.kvpress) return ByBudget("chunkkv", chunk.budget, chunk.window);
    // A share of whole chunks. The last one may be short, and may be kept or not.
    const std::uint64_t length = tokens < chunk.chunk ? 1 : chunk.chunk;
    const std::uint64_t chunks = (tokens + length - 1) / length;
    const auto wanted =
        static_cast<std::uint64_t>(static_cast<double>(chunks) * (1 - (1 - chunk.budget.share)));
    const std::uint64_t count = std::clamp<std::uint64_t>(wanted, 1, chunks);
    const std::uint64_t missing = chunks * length - tokens;
    return KeptTokens{.least = count * length - missing, .most = std::min(count * length, tokens)};
  }
  absl::StatusOr<KeptTokens> operator()(const SemanticKvPolicy& semantic) const {
    const auto all = static_cast<double>(tokens);
    const std::uint64_t recent = std::max<std::uint64_t>(1, CountUp(semantic.recent_ratio * all));
    const std::uint64_t ends = semantic.sink + recent;
    const std::uint64_t between = tokens - std::min(tokens, ends);
    if (semantic.keep_middle.has_value()) {
      return Exactly(ends + CountDown(*semantic.keep_middle * static_cast<double>(between)));
    }
    return Exactly(std::max(ends, CountDown(semantic.keep_total * all)));
  }
  absl::StatusOr<KeptTokens> operator()(const SemantiCachePolicy& cache) const {
    const std::uint64_t ends = std::min(cache.sink + cache.recent, tokens);
    if (!cache.budget.has_value()) return KeptTokens{.least = ends, .most = tokens};
    // The lanes of a layer share the budget: their mean may be a fraction.
    const std::uint64_t most = CountUp(*cache.budget * static_cast<double>(tokens));
    return KeptTokens{.least = std::min(ends, most), .most = std::max(ends, most)};
  }
  // Its ladders drop whole steps, so that lanes hold less than the budget most of the time.
  absl::StatusOr<KeptTokens> operator()(const LaCachePolicy& ladder) const {
    if (tokens <= ladder.budget) return Exactly(tokens);
    return KeptTokens{.least = std::min(ladder.sink, tokens), .most = ladder.budget};
  }
  absl::StatusOr<KeptTokens> operator()(const StreamingPolicy& streaming) const {
    return Exactly(streaming.sink + streaming.newest());
  }
  absl::StatusOr<KeptTokens> operator()(const H2oPolicy& h2o) const {
    return Exactly(h2o.heavy + h2o.recent);
  }
  absl::StatusOr<KeptTokens> operator()(const SnapKvPolicy& snap) const {
    if (tokens <= snap.scoring.window) return Exactly(tokens);
    return ByBudget("snapkv", snap.budget, snap.scoring.window);
  }
  absl::StatusOr<KeptTokens> operator()(const PyramidKvPolicy& pyramid) const {
    if (tokens <= pyramid.scoring.window) return Exactly(tokens);
    absl::StatusOr<KeptTokens> mean = ByBudget("pyramidkv", pyramid.budget, pyramid.scoring.window);
    // The layers' budgets are rounded one by one.
    if (mean.ok() && mean->most < tokens) ++mean->most;
    return mean;
  }
  absl::StatusOr<KeptTokens> operator()(const TovaPolicy& tova) const {
    return Exactly(tova.budget);
  }
};

}  // namespace

absl::StatusOr<KeptTokens> KeptTokensOf(const Policy& policy, std::uint64_t tokens) {
  KeptTokens kept = {.least = tokens, .most = tokens};
  if (policy.tokens.has_value()) {
    absl::StatusOr<KeptTokens> chosen = std::visit(Counting{tokens}, *policy.tokens);
    if (!chosen.ok()) return chosen.status();
    kept = *chosen;
  }
  if (policy.merging.has_value()) {
    const absl::StatusOr<KeptTokens> merged = std::visit(Counting{tokens}, *policy.merging);
    if (!merged.ok()) return merged.status();
    kept = {.least = std::min(kept.least, merged->least),
            .most = std::min(kept.most, merged->most)};
  }
  return kept;
}

}  // namespace tessera::policies
