// Helpers to run a policy on a layer and to write decisions as lists.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string_view>
#include <vector>

#include "daemon/policies/grammar/parse.h"
#include "daemon/policies/token_policy.h"
#include "kernels/dispatch/implementation.h"
#include "tests/fakes/observed_layer.h"

namespace tessera::policies {

using Indices32 = std::vector<std::uint32_t>;

// Products in double, so that a direct computation finds the same order.
inline const kernels::Operations& ExactOperations() {
  return kernels::OperationsOf(*kernels::FindImplementation("reference"));
}

inline Policy Parsed(std::string_view text) {
  absl::StatusOr<Policy> policy = ParsePolicy(text);
  EXPECT_TRUE(policy.ok()) << policy.status();
  return policy.ok() ? *std::move(policy) : Policy{};
}

// `decoded`: the number of newest tokens that belong to no prompt.
inline LayerDecision DecisionOf(std::string_view text, ObservedLayer& layer, LayerMemory& memory,
                                std::uint64_t decoded = 0) {
  const Policy policy = Parsed(text);
  absl::StatusOr<LayerDecision> decision =
      Decide(policy, layer.Show(NeedsOf(policy), layer.tokens() - decoded), memory);
  EXPECT_TRUE(decision.ok()) << text << ": " << decision.status();
  return decision.ok() ? *std::move(decision) : LayerDecision(layer.lanes().size());
}
inline LayerDecision DecisionOf(std::string_view text, ObservedLayer& layer) {
  LayerMemory memory;
  return DecisionOf(text, layer, memory);
}

inline std::vector<Indices32> KeptOf(const LayerDecision& decision) {
  std::vector<Indices32> kept;
  for (const LaneDecision& lane : decision) kept.push_back(lane.kept);
  return kept;
}

// By definition: takes the best scores one by one, ties to the lower index. Returns them in
// ascending order.
inline Indices32 ReferenceTop(const std::vector<double>& scores, std::size_t count) {
  Indices32 best;
  std::vector<bool> taken(scores.size());
  while (best.size() < std::min(count, scores.size())) {
    std::size_t next = scores.size();
    for (std::size_t i = 0; i < scores.size(); ++i) {
      if (!taken[i] && (next == scores.size() || scores[i] > scores[next])) next = i;
    }
    taken[next] = true;
    best.push_back(static_cast<std::uint32_t>(next));
  }
  std::ranges::sort(best);
  return best;
}

// A layer of random shape and length.
inline ObservedLayerOptions RandomForm(TestRandom& random) {
  const auto group = static_cast<std::uint32_t>(random.Between(1, 3));
  const auto kv_heads = static_cast<std::uint32_t>(random.Between(1, 3));
  return {.query_heads = group * kv_heads,
          .kv_heads = kv_heads,
          .type = random.OneIn(2) ? kernels::ElementType::kFp32 : kernels::ElementType::kBf16,
          .layer = static_cast<std::uint32_t>(random.Below(4)),
          .sliding_window = static_cast<std::uint32_t>(random.OneIn(4) ? random.Between(5, 90) : 0),
          .logit_softcap = random.OneIn(4) ? 3.0f : 0.0f,
          .observations_per_call =
              static_cast<std::uint32_t>(random.OneIn(2) ? 1 : random.Between(2, 9))};
}

}  // namespace tessera::policies
