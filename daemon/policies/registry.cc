#include "daemon/policies/registry.h"

#include <algorithm>
#include <array>

#include "daemon/base/strings.h"
#include "daemon/policies/registry_rows.h"
#include "daemon/policies/token_policy.h"
#include "daemon/policies/token_system.h"

namespace tessera::policies {
namespace {

constexpr std::array kKinds = {
    &kDense,     &kChunkKv, &kSemanticKv,   &kLaCache,  &kStreaming, &kH2o,   &kSnapKv,
    &kPyramidKv, &kTova,    &kSemantiCache, &kMosaicKv, &kPlanes,    &kThink, &kQuest,
    &kSelect,    &kSigns,   &kBf16,         &kFp16,     &kInt8,      &kFp8,
};

// In the order of kKinds.
constexpr std::array<const TermKind*, kSystems> kSystemKinds = {
    &kChunkKv, &kSemanticKv,   &kLaCache,  &kStreaming, &kH2o,   &kSnapKv, &kPyramidKv,
    &kTova,    &kSemantiCache, &kMosaicKv, &kPlanes,    &kThink, &kQuest,  &kSigns,
};

}  // namespace

std::span<const TermKind* const, kSystems> Systems() { return kSystemKinds; }

std::optional<std::size_t> SystemOf(const Policy& policy) {
  const TermKind* system = nullptr;
  if (policy.tokens.has_value()) {
    system = &KindOf(*policy.tokens);
  } else if (policy.merging.has_value()) {
    system = &KindOf(*policy.merging);
  } else if (policy.mosaic.has_value()) {
    system = &kMosaicKv;
  } else if (policy.planes.has_value()) {
    system = &kPlanes;
  } else if (policy.key_channels.has_value()) {
    system = &kThink;
  } else if (policy.summaries.has_value()) {
    system = &kQuest;
  } else if (policy.signs) {
    system = &kSigns;
  }
  const auto found = std::ranges::find(kSystemKinds, system);
  if (found == kSystemKinds.end()) return std::nullopt;
  return static_cast<std::size_t>(found - kSystemKinds.begin());
}

std::string_view DecidesText(Decides decides) {
  switch (decides) {
    case Decides::kNothing:
      return "nothing";
    case Decides::kTokens:
      return "which tokens are kept";
    case Decides::kMerging:
      return "which tokens are merged";
    case Decides::kPacking:
      return "how rows are packed";
    case Decides::kSelection:
      return "what attention reads";
    case Decides::kValues:
      return "the type of packed values";
  }
  return "unknown";
}

std::span<const TermKind* const> TermKinds() { return kKinds; }

const TermKind* FindTermKind(std::string_view name) {
  const auto kind = std::ranges::find_if(
      kKinds, [name](const TermKind* candidate) { return candidate->name == name; });
  return kind == kKinds.end() ? nullptr : *kind;
}

std::string NeedsTextOf(const TermKind& kind) {
  if (kind.decides == Decides::kSelection || kind.decides == Decides::kValues) return "";
  Policy policy;
  kind.apply(Values(kind.options), policy);
  return policy.chooses() ? NeedsText(NeedsOf(policy)) : "";
}

std::string TermNames() {
  std::string names;
  for (const TermKind* kind : kKinds) Append(names, names.empty() ? "" : ", ", kind->name);
  return names;
}

}  // namespace tessera::policies
