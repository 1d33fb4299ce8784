// StreamingLLM: keeps the first few tokens, which serve as attention sinks, and the newest tokens.
// lacache.cc describes pos=slot.
#include "daemon/base/strings.h"
#include "daemon/policies/registry_rows.h"
#include "daemon/policies/token_system.h"
#include "daemon/policies/tokens/shared/keep.h"
#include "daemon/policies/tokens/shared/positions.h"
#include "daemon/policies/tokens/shared/token_budget.h"

namespace tessera::policies {
namespace {

constexpr std::string_view kName = "streaming";

constexpr Option kOptions[] = {
    {.name = "sink",
     .type = OptionType::kCount,
     .standard = "4",
     .most = kMostPinned,
     .unit = "tokens",
     .help = "Number of first tokens to keep"},
    {.name = "recent",
     .type = OptionType::kCount,
     .standard = "512",
     .least = 1,
     .most = kMostEntries,
     .unit = "tokens",
     .help = "Number of newest tokens to keep; not together with budget"},
    {.name = kBudget,
     .type = OptionType::kCount,
     .least = 1,
     .most = kMostEntries,
     .unit = "tokens",
     .help = "Number of tokens to keep, including the first ones; replaces recent"},
    kPositionsOption,
};

std::string Check(const Term& term, std::span<const Term> all) {
  const Values& values = term.values;
  if (std::string why = SlotPositionConflict(values, all); !why.empty()) return why;
  if (!values.given(kBudget)) return "";
  if (values.given("recent")) return "recent and budget are both given; give only one of them";
  if (values.Count(kBudget) > values.Count("sink")) return "";
  return Concat("budget ", values.Count(kBudget), " is not more than sink ", values.Count("sink"),
                ", which counts in it");
}

void Apply(const Values& values, Policy& policy) {
  StreamingPolicy streaming = {.sink = values.Count("sink"), .slot_positions = BySlot(values)};
  if (values.given(kBudget)) {
    streaming.budget = values.Count(kBudget);
  } else {
    streaming.recent = values.Count("recent");
  }
  policy.tokens = streaming;
}

std::optional<Values> Read(const Policy& policy) {
  const auto* const streaming = TokensOf<StreamingPolicy>(policy);
  if (streaming == nullptr) return std::nullopt;
  Values values(kOptions);
  values.Give("sink", static_cast<double>(streaming->sink));
  values.Give("recent", static_cast<double>(streaming->recent));
  if (streaming->budget != 0) values.Give(kBudget, static_cast<double>(streaming->budget));
  GivePositions(streaming->slot_positions, values);
  return values;
}

Needs NeedsFrom(const TokenPolicy&) { return {}; }

absl::StatusOr<LayerDecision> DecideLayer(const TokenPolicy& tokens, const LayerView& view,
                                          LayerMemory&) {
  const auto& streaming = std::get<StreamingPolicy>(tokens);
  const std::uint64_t recent = streaming.newest();
  LayerDecision decision;
  for (const LaneEntries& lane : view.lanes) {
    if (lane.count <= streaming.sink + recent) {
      decision.push_back(KeepAll(lane));
      continue;
    }
    const std::vector<double> between(lane.count - streaming.sink - recent);
    decision.push_back(KeepBetween(lane, streaming.sink, recent, 0, between));
  }
  return decision;
}

// The decision depends on positions alone, so many steps may be replayed as one.
absl::StatusOr<LayerDecision> AdvanceLayer(const TokenPolicy& tokens, const LayerView& view,
                                           std::span<const std::uint64_t>, LayerMemory& memory) {
  return DecideLayer(tokens, view, memory);
}

bool MovesKeys(const TokenPolicy& tokens) {
  return std::get<StreamingPolicy>(tokens).slot_positions;
}

constexpr TokenSystem kSystem = {.is = Is<StreamingPolicy>,
                                 .needs = NeedsFrom,
                                 .decide = DecideLayer,
                                 .advance = AdvanceLayer,
                                 .moves_positions = MovesKeys};

}  // namespace

constexpr TermKind kStreaming = {
    .name = kName,
    .is = "Keeps the first tokens and a window of the newest",
    .sets = "tokens, also while decoding, the same in every layer",
    .paper = "StreamingLLM (arXiv 2309.17453)",
    .decides = Decides::kTokens,
    .options = kOptions,
    .check = Check,
    .apply = Apply,
    .read = Read,
    .tokens = &kSystem,
};

}  // namespace tessera::policies
