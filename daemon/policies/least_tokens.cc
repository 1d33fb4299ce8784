#include "daemon/policies/least_tokens.h"

#include <algorithm>
#include <variant>

namespace tessera::policies {
namespace {

std::uint64_t KeptBy(const EntryBudget& budget, std::uint64_t window) {
  return std::max(budget.tokens, window);
}

struct Keeps {
  std::uint64_t operator()(const ChunkKvPolicy& chunk) const {
    return KeptBy(chunk.budget, chunk.window);
  }
  // At least one of the newest tokens is kept.
  std::uint64_t operator()(const SemanticKvPolicy& semantic) const { return semantic.sink + 1; }
  std::uint64_t operator()(const SemantiCachePolicy& cache) const {
    return cache.sink + cache.recent;
  }
  std::uint64_t operator()(const LaCachePolicy& ladder) const { return ladder.budget; }
  std::uint64_t operator()(const StreamingPolicy& streaming) const {
    return streaming.sink + streaming.newest();
  }
  std::uint64_t operator()(const H2oPolicy& h2o) const { return h2o.heavy + h2o.recent; }
  std::uint64_t operator()(const SnapKvPolicy& snap) const {
    return KeptBy(snap.budget, snap.scoring.window);
  }
  std::uint64_t operator()(const PyramidKvPolicy& pyramid) const {
    return KeptBy(pyramid.budget, pyramid.scoring.window);
  }
  std::uint64_t operator()(const TovaPolicy& tova) const { return tova.budget; }
};

}  // namespace

std::uint64_t KeepsUpTo(const Policy& policy) {
  if (!policy.drops_entries()) {
    return policy.key_channels.has_value() ? policy.key_channels->recent : 0;
  }
  std::uint64_t kept = ~std::uint64_t{0};
  for (const auto* const tokens : {&policy.tokens, &policy.merging}) {
    if (tokens->has_value()) kept = std::min(kept, std::visit(Keeps(), **tokens));
  }
  return kept;
}

}  // namespace tessera::policies
