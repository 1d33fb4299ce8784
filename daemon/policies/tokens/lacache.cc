// LaCache: layers keep different tokens, in ladders, so that together they cover more of the text
// than one layer could. kernels/tokens/ladder.h defines the rule.
//
// A span of a quarter to a half of the layers suits language modelling; it must be less than the
// model's layers. All lanes of a layer must have the same length.
//
// pos=slot, here and in `streaming`: only Compress moves entries; the end of a prompt alone does
// not. Compress closes the tail first, because its tokens were computed for the old positions. The
// next position is the worker's again when every layer has been compressed. Until then, calls that
// would mix old and new positions are refused, and so is another policy. Rows that the worker
// appends carry the shift for which they were computed (AppendRequest.position_shift) and are
// refused if entries have moved since. Packed rows cannot be moved. Each move of a bf16 key rounds
// it by 0.2 % of its length, which adds up like a random walk: 1.5 % after 32 moves, 3 % after 128.
#include <algorithm>

#include "absl/status/status.h"
#include "daemon/base/strings.h"
#include "daemon/cache/model/model.h"
#include "daemon/policies/registry_rows.h"
#include "daemon/policies/token_system.h"
#include "daemon/policies/tokens/shared/keep.h"
#include "daemon/policies/tokens/shared/observed_prompt.h"
#include "daemon/policies/tokens/shared/positions.h"
#include "daemon/policies/tokens/shared/token_budget.h"
#include "kernels/tokens/ladder.h"

namespace tessera::policies {
namespace {

using kernels::LadderFault;

constexpr std::string_view kName = "lacache";
constexpr std::string_view kMapWords[] = {"mod", "band"};
constexpr std::string_view kPassWords[] = {"repeat", "uniform"};
constexpr std::uint32_t kUsualSpan = 16;

constexpr Option kOptions[] = {
    {.name = kBudget,
     .type = OptionType::kCount,
     .standard = "256",
     .least = 1,
     .most = kMostEntries,
     .unit = "tokens",
     .help = "Number of tokens to keep per layer; after the first overflow, plus half of what a "
             "ladder removes"},
    {.name = "span",
     .type = OptionType::kCount,
     .least = 1,
     .most = cache::kMaxLayers,
     .unit = "layers",
     .help = "Number of layers that keep the same token; default 16, or half of the layers if the "
             "model has fewer than 32"},
    {.name = "overlap",
     .type = OptionType::kCount,
     .standard = "0",
     .most = cache::kMaxLayers - 1,
     .unit = "layers",
     .help = "Number of these layers that also keep the next token; less than span"},
    {.name = "sink",
     .type = OptionType::kCount,
     .standard = "4",
     .most = kMostPinned,
     .unit = "tokens",
     .help = "Number of first tokens to keep"},
    {.name = "map",
     .type = OptionType::kWord,
     .standard = "mod",
     .words = kMapWords,
     .help = "Whether ladders differ between neighbouring layers (mod), or between neighbouring "
             "bands of layers"},
    {.name = "pass",
     .type = OptionType::kWord,
     .standard = "repeat",
     .words = kPassWords,
     .help = "Whether a much longer prompt is laddered repeatedly from its beginning, or evenly "
             "(uniform)"},
    kPositionsOption,
};

std::string Check(const Term& term, std::span<const Term> all) {
  const Values& values = term.values;
  const std::uint64_t span = values.given("span") ? values.Count("span") : kUsualSpan;
  if (values.Count("overlap") >= span) {
    return Concat("overlap ", values.Count("overlap"), " is not less than span ", span);
  }
  if (values.Count(kBudget) <= values.Count("sink")) {
    return Concat("budget ", values.Count(kBudget), " is not more than sink ", values.Count("sink"),
                  ", which counts in it");
  }
  return SlotPositionConflict(values, all);
}

void Apply(const Values& values, Policy& policy) {
  policy.tokens = LaCachePolicy{.budget = values.Count(kBudget),
                                .span = values.given("span") ? values.Count32("span") : 0,
                                .overlap = values.Count32("overlap"),
                                .sink = values.Count("sink"),
                                .band = values.Word("map") == kMapWords[1],
                                .uniform = values.Word("pass") == kPassWords[1],
                                .slot_positions = BySlot(values)};
}

std::optional<Values> Read(const Policy& policy) {
  const auto* const ladder = TokensOf<LaCachePolicy>(policy);
  if (ladder == nullptr) return std::nullopt;
  Values values(kOptions);
  values.Give(kBudget, static_cast<double>(ladder->budget));
  if (ladder->span != 0) values.Give("span", ladder->span);
  values.Give("overlap", ladder->overlap);
  values.Give("sink", static_cast<double>(ladder->sink));
  values.Give("map", kMapWords[ladder->band ? 1 : 0]);
  values.Give("pass", kPassWords[ladder->uniform ? 1 : 0]);
  GivePositions(ladder->slot_positions, values);
  return values;
}

Needs NeedsFrom(const TokenPolicy&) { return {}; }

// A default span of more than half of the layers would remove nothing.
std::uint32_t SpanFor(const LaCachePolicy& ladder, std::uint32_t layers) {
  if (ladder.span != 0) return ladder.span;
  return std::clamp(layers / 2, 1u, kUsualSpan);
}

kernels::LadderOptions LadderFor(const LaCachePolicy& ladder, std::uint32_t layers) {
  return {.layers = layers,
          .span = SpanFor(ladder, layers),
          .overlap = ladder.overlap,
          .sink = ladder.sink,
          .entries = ladder.budget,
          .band = ladder.band,
          .uniform = ladder.uniform};
}

template <typename... Parts>
absl::Status Refuse(const Parts&... why) {
  return absl::InvalidArgumentError(Concat("policy: ", kName, ": ", why...));
}

bool MovesKeys(const TokenPolicy& tokens) { return std::get<LaCachePolicy>(tokens).slot_positions; }

absl::Status CheckModel(const TokenPolicy& tokens, const ModelFacts& model) {
  const std::uint32_t layers = model.layers;
  const auto& ladder = std::get<LaCachePolicy>(tokens);
  const kernels::LadderOptions options = LadderFor(ladder, layers);
  if (layers == 1) {
    return Refuse(
        "ladders need at least 2 layers, but the model has 1; use streaming, which keeps the first "
        "and the newest tokens");
  }
  switch (kernels::FaultOf(options)) {
    case LadderFault::kNone:
      return absl::OkStatus();
    case LadderFault::kSpan:
      return Refuse("span ", options.span, " is not 1 to the model's ", layers, " layers");
    case LadderFault::kOverlap:
      return Refuse("overlap ", ladder.overlap, " is not less than span ", options.span);
    case LadderFault::kNothingRemoved:
      return Refuse("span ", options.span, " with overlap ", ladder.overlap, " of ", layers,
                    " layers drops nothing: every layer keeps all of a ladder's ",
                    kernels::ShapeOf(options).length, " tokens");
    case LadderFault::kTooFewEntries:
      return Refuse("budget ", ladder.budget, " is too small for ladders over ", layers,
                    " layers; it must be at least ", kernels::LeastEntries(options));
  }
  return absl::OkStatus();
}

// Ladders count entries, whatever their tokens are, so the lanes only need equal lengths.
absl::Status CheckView(const TokenPolicy& tokens, const LayerView& view) {
  if (absl::Status status = CheckModel(tokens, {.layers = view.layers}); !status.ok())
    return status;
  return CheckEqualCounts(kName, view);
}

// Replays forward steps, a prompt at once: after each step, drops what no longer fits.
absl::StatusOr<LayerDecision> AdvanceLayer(const TokenPolicy& tokens, const LayerView& view,
                                           std::span<const std::uint64_t> before,
                                           LayerMemory& memory) {
  if (absl::Status status = CheckView(tokens, view); !status.ok()) return status;
  const kernels::LadderOptions options = LadderFor(std::get<LaCachePolicy>(tokens), view.layers);
  kernels::LadderState state = {.cursor = memory.cursor, .capacity = memory.capacity};
  std::vector<std::uint32_t> held = Indices(0, before.front());
  const LaneEntries& lane = view.lanes.front();
  for (std::uint64_t i = before.front(); i < lane.count;) {
    const std::uint64_t end = view.StepEnd(lane.positions[i]);
    for (; i < lane.count && lane.positions[i] < end; ++i) {
      held.push_back(static_cast<std::uint32_t>(i));
    }
    kernels::StepLadder(options, view.layer, state, held);
  }
  memory.cursor = state.cursor;
  memory.capacity = state.capacity;
  return KeepInEveryLane(view, held);
}

absl::StatusOr<LayerDecision> DecideLayer(const TokenPolicy& tokens, const LayerView& view,
                                          LayerMemory& memory) {
  constexpr std::uint64_t kNone[] = {0};
  return AdvanceLayer(tokens, view, kNone, memory);
}

LaneEquality WantsAlike(const TokenPolicy&) { return LaneEquality::kLength; }

constexpr TokenSystem kSystem = {.is = Is<LaCachePolicy>,
                                 .needs = NeedsFrom,
                                 .decide = DecideLayer,
                                 .advance = AdvanceLayer,
                                 .lane_equality = WantsAlike,
                                 .moves_positions = MovesKeys,
                                 .check_model = CheckModel};

}  // namespace

constexpr TermKind kLaCache = {
    .name = kName,
    .is = "Keeps different tokens in different layers, in ladders that together cover more text",
    .sets = "tokens, also while decoding, different in every layer",
    .paper = "LaCache (arXiv 2507.14204)",
    .decides = Decides::kTokens,
    .options = kOptions,
    .check = Check,
    .apply = Apply,
    .read = Read,
    .tokens = &kSystem,
};

}  // namespace tessera::policies
