#include "daemon/compaction/lanes/token_selector.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "daemon/base/strings.h"
#include "daemon/compaction/lanes/lane_coder.h"
#include "daemon/compaction/lanes/token_selector_lanes.h"
#include "daemon/policies/tokens/shared/keep.h"
#include "daemon/policies/tokens/shared/observed_prompt.h"
#include "daemon/policies/tokens/shared/text_chunks.h"

namespace tessera::compaction {

namespace {

// Whether the policy scores keys. Merging policies do, even if they need no observations.
bool ReadsKeys(const policies::Policy& policy) {
  return policies::Merges(policy) || policies::NeedsOf(policy) != policies::Needs();
}

// The first token from `from` on whose query was not observed.
std::uint64_t ShownUntil(std::span<const policies::HeadQueries> queries, std::uint64_t from) {
  if (queries.empty()) return from;
  std::uint64_t until = from;
  for (const std::uint64_t position : queries.front().positions) {
    if (position == until) ++until;
  }
  return until;
}

}  // namespace

TokenSelector::TokenSelector(const Options& options, std::uint32_t layer)
    : options_(options), layer_(layer) {}

absl::StatusOr<TokenSelector::Lanes> TokenSelector::Look(bool whole, bool wants_keys) const {
  const cache::Sequence& sequence = *options_.sequence;
  absl::StatusOr<std::vector<cache::OpenRun>> runs = sequence.LookAt(layer_, whole);
  if (!runs.ok()) return runs.status();
  Lanes lanes;
  for (const cache::OpenRun& run : *runs) {
    lanes.seen.emplace_back(run);
    lanes.losses.push_back(run.losses);
    lanes.channels_gone.push_back(
        KeyChannelFormOf(run, *options_.policy, sequence.model().geometry(layer_)) != nullptr);
  }
  if (wants_keys) {
    const cache::Model& model = sequence.model();
    LayerKeys::Options options = {.device = sequence.memory().device,
                                  .geometry = model.geometry(layer_)};
    if (policies::UsesUnrotatedKeys(*options_.policy)) {
      options.turner.emplace(model.spec().RopeOf(layer_), model.layout().tile(layer_));
    }
    lanes.keys = std::make_unique<LayerKeys>(options, *std::move(runs));
  }
  for (const LaneEntryList& seen : lanes.seen) {
    lanes.entries.push_back(seen.view());
    const std::span<const std::uint64_t> positions = lanes.entries.back().positions;
    if (positions.empty()) continue;
    lanes.begin = lanes.end == 0 ? positions.front() : std::min(lanes.begin, positions.front());
    lanes.end = std::max(lanes.end, positions.back() + 1);
    lanes.tokens = std::max(lanes.tokens, seen.tokens());
  }
  return lanes;
}

absl::StatusOr<std::uint64_t> TokenSelector::Begin() const {
  const auto runs = options_.sequence->LookAt(layer_, ChoosesFromAll(*options_.policy));
  if (!runs.ok()) return runs.status();
  std::optional<std::uint64_t> begin;
  for (const cache::OpenRun& run : *runs) {
    for (const auto* segments : {&run.settled, &run.provisional, &run.plain}) {
      for (const cache::HeldSegment& held : *segments) {
        if (held.entries == 0) continue;
        const std::uint64_t first = held.segment->PositionOf(0);
        begin = std::min(begin.value_or(first), first);
      }
    }
  }
  return begin.value_or(0);
}

absl::StatusOr<std::uint64_t> TokenSelector::NormsFrom() const {
  absl::StatusOr<std::uint64_t> begin = Begin();
  if (!begin.ok()) return begin;
  return FirstOfPrompts(options_.prompts, *begin);
}

// Nothing is decided after a token without an observed query. If later queries were observed, the
// gap can never be filled, so this is an error.
absl::Status TokenSelector::CheckShown(std::span<const policies::HeadQueries> queries,
                                       std::uint64_t until, std::uint64_t end) const {
  if (until >= end) return absl::OkStatus();
  std::span<const std::uint64_t> positions;
  if (!queries.empty()) positions = queries.front().positions;
  const auto next = std::lower_bound(positions.begin(), positions.end(), until);
  const bool later = next != positions.end() && *next < end;
  if (!later && !options_.all_shown) return absl::OkStatus();
  return absl::FailedPreconditionError(
      Concat("layer ", layer_, ": the queries of the tokens from ", until, " to ",
             (later ? *next : end) - 1,
             " have not been observed, but the policy needs the query of every token; "
             "send them with Attend in a step, or with ",
             policies::kObserveCall));
}

// Ends before a prompt that is only partly observed: decisions about a prompt must not depend on
// when the choice ran.
std::uint64_t TokenSelector::WholeSteps(std::uint64_t until, std::uint64_t end) const {
  for (const policies::TokenSpan& prompt : options_.prompts) {
    if (prompt.begin < until && until < std::min(prompt.end, end)) return prompt.begin;
  }
  return until;
}

// The first token of a prompt that ends at `end` and may still grow; `end`: there is none.
std::uint64_t TokenSelector::OpenPrompt(std::uint64_t end) const {
  if (options_.prompts.empty()) return end;
  const policies::TokenSpan& last = options_.prompts.back();
  return last.end >= end ? std::min(last.begin, end) : end;
}

std::uint64_t TokenSelector::Stop(const LayerState& state) const {
  if (HasStops(*options_.policy)) return StopAfter(options_.prompts, state.decided_until);
  const policies::TokenSpan* const prompt =
      ChoosesByPrompt(*options_.policy) ? NextPrompt(state) : nullptr;
  return prompt == nullptr ? ~std::uint64_t{0} : prompt->end;
}

// Null: all prompts were considered.
const policies::TokenSpan* TokenSelector::NextPrompt(const LayerState& state) const {
  const auto next = std::ranges::find_if(options_.prompts, [&](const policies::TokenSpan& prompt) {
    return prompt.end > state.considered_until;
  });
  return next == options_.prompts.end() ? nullptr : &*next;
}

absl::StatusOr<bool> TokenSelector::EncodesFirst(const LayerState& state) const {
  if (ChoosesByPrompt(*options_.policy)) return NextPrompt(state) != nullptr;
  // The first choice scores rows as they were appended.
  if (!policies::Continues(*options_.policy) || LeavesRows(*options_.policy) ||
      state.decided_until == 0) {
    return false;
  }
  if (!HasStops(*options_.policy)) return true;
  absl::StatusOr<Lanes> lanes = Look(/*whole=*/true, /*keys=*/false);
  if (!lanes.ok()) return lanes.status();
  const absl::StatusOr<Cuts> cuts = Cut(state, *lanes);
  if (!cuts.ok()) return cuts.status();
  return !cuts->waits;
}

// Hides entries that cannot be decided about now.
absl::StatusOr<TokenSelector::Cuts> TokenSelector::Cut(const LayerState& state,
                                                       Lanes& lanes) const {
  const policies::Policy& policy = *options_.policy;
  const std::uint64_t decided_until = state.decided_until;
  Cuts cuts;
  // Merging policies count tokens: the last entry may stand for later tokens than its position.
  if (policies::Merges(policy) && !options_.sequence->HasMoved()) lanes.end = lanes.tokens;
  const std::uint64_t whole = lanes.end;
  const std::uint64_t stop = Stop(state);
  if (stop < lanes.end) {
    lanes.CutAt(stop);
    cuts.goes_on = true;
  }
  // A prompt without observations may still be arriving. A policy that learns from every query must
  // not decide about it yet: the worker would have to send its first queries again.
  const bool learns = policies::Continues(policy) && policies::NeedsOf(policy).decode_queries;
  const bool unseen = learns && !options_.all_shown && state.observation.bytes() == 0;
  if (options_.decoding || unseen) {
    lanes.CutAt(std::max(decided_until, OpenPrompt(whole)));
  }
  // Entries dropped because of tokens that are taken back later would be lost.
  if (policies::Continues(policy) && options_.open_step != nullptr) {
    lanes.CutAt(std::max(decided_until, options_.open_step->FinalBefore(whole)));
  }
  cuts.advances = policies::Continues(policy) && decided_until > 0;
  if (policies::NeedsOf(policy).decode_queries) {
    const std::vector<policies::HeadQueries> queries = state.observation.queries();
    // A sequence without a prompt: every token was decoded, and its query observed.
    cuts.advances = cuts.advances || (lanes.begin == 0 && ShownUntil(queries, 0) >= lanes.end);
    if (cuts.advances) {
      const std::uint64_t until = ShownUntil(queries, decided_until);
      if (absl::Status status = CheckShown(queries, until, lanes.end); !status.ok()) return status;
      lanes.CutAt(std::max(decided_until, WholeSteps(until, lanes.end)));
    }
  } else if (lanes.begin == 0 && options_.prompts.empty()) {
    // All tokens were decoded one by one.
    cuts.advances = policies::Continues(policy);
  }
  // Only a caller ends a choice before the stop.
  cuts.waits = HasStops(policy) && lanes.end < stop && !options_.asked;
  cuts.goes_on = cuts.goes_on && lanes.end == stop;
  return cuts;
}

absl::StatusOr<LayerChoice> TokenSelector::Choose(const LayerState& state) const {
  const policies::Policy& policy = *options_.policy;
  const std::uint64_t decided_until = state.decided_until;
  const bool whole = ChoosesFromAll(policy);
  absl::StatusOr<Lanes> lanes = Look(whole, ReadsKeys(policy));
  if (!lanes.ok()) return lanes.status();
  const absl::StatusOr<Cuts> cuts = Cut(state, *lanes);
  if (!cuts.ok()) return cuts.status();
  if (cuts->waits) lanes->CutAt(decided_until);
  LayerChoice choice = About(*lanes, state);
  choice.continued = cuts->advances;
  choice.goes_on = cuts->goes_on;
  choice.idle = cuts->waits || NothingNew(*lanes, state);
  if (cuts->waits) choice.until = decided_until;
  const Shown shown(options_, layer_, state, *lanes, whole ? 0 : lanes->begin);
  absl::StatusOr<policies::LayerDecision> decision =
      !policy.drops_entries() || choice.idle ? policies::KeepAll(shown.view())
      : cuts->advances ? policies::Advance(policy, shown.view(), lanes->CountsBefore(decided_until),
                                           choice.memory)
                       : policies::Decide(policy, shown.view(), choice.memory);
  if (policies::LeavesWhole(decision.status())) {
    choice.refused = OfLayer(decision.status());
    decision = policies::KeepAll(shown.view());
  }
  if (!decision.ok()) return OfLayer(decision.status());
  choice.lanes = *std::move(decision);
  if (absl::Status status = ForgetBoundaries(*lanes, choice); !status.ok()) return status;
  if (!choice.refused.ok() || !NeedsKeyChannels(*lanes, choice.lanes)) {
    // They wait, however many they are: another budget may be set.
    choice.waits = !choice.refused.ok() || LeavesAllOpen(*lanes, choice);
    // Nothing is carried out, so nothing is remembered.
    if (choice.waits && choice.UntouchedAll()) {
      choice.until = decided_until;
      choice.memory = state.memory;
    }
    return choice;
  }
  absl::StatusOr<policies::ChannelDecision> channels =
      policies::DecideKeyChannels(policy, shown.view());
  if (!channels.ok()) return OfLayer(channels.status());
  choice.key_channels = *std::move(channels);
  return choice;
}

LayerChoice TokenSelector::About(const Lanes& lanes, const LayerState& state) {
  return {.lanes = {},
          .decided = lanes.Counts(),
          .first_positions = lanes.FirstPositions(),
          .losses = lanes.losses,
          .done = std::vector<bool>(lanes.losses.size()),
          .memory = state.memory,
          .end = lanes.end,
          // Decided tokens at the end may have been dropped.
          .until = std::max<std::uint64_t>(lanes.end, state.decided_until)};
}

absl::StatusOr<LayerChoice> TokenSelector::KeepDecoded(const LayerState& state) const {
  absl::StatusOr<Lanes> lanes = Look(/*whole=*/false, /*keys=*/false);
  if (!lanes.ok()) return lanes.status();
  const std::uint64_t prompts = options_.prompts.empty() ? 0 : options_.prompts.back().end;
  const std::uint64_t tokens = lanes->end - lanes->begin;
  const bool open = lanes->begin < prompts && state.considered_until < prompts;
  lanes->CutAt(open ? lanes->begin : lanes->end - tokens % kernels::kTileEntries);
  LayerChoice choice = About(*lanes, state);
  choice.keeps = true;
  choice.lanes = policies::KeepAll(Shown(options_, layer_, state, *lanes, lanes->begin).view());
  choice.waits = lanes->begin == lanes->end;
  if (choice.waits) choice.until = state.decided_until;
  return choice;
}

absl::StatusOr<std::optional<LayerChoice>> TokenSelector::Align(const LayerState& state) const {
  const policies::Policy& policy = *options_.policy;
  if (ChoosesByPrompt(policy)) return AlignToPrompt(state);
  if (ChoosesFromAll(policy) || policy.key_channels.has_value() ||
      policies::NeededLaneEquality(policy) == policies::LaneEquality::kNothing) {
    return std::nullopt;
  }
  absl::StatusOr<Lanes> lanes = Look(/*whole=*/false, /*keys=*/false);
  if (!lanes.ok()) return lanes.status();
  std::uint64_t from = lanes->begin;
  for (const policies::LaneEntries& lane : lanes->entries) {
    from = std::max(from, lane.count == 0 ? lanes->end : lane.positions.front());
  }
  if (from == lanes->begin) return std::nullopt;
  lanes->CutAt(from);
  LayerChoice choice = About(*lanes, state);
  choice.until = state.decided_until;
  choice.keeps = choice.aligns = true;
  choice.lanes = policies::KeepAll(Shown(options_, layer_, state, *lanes, lanes->begin).view());
  for (std::size_t head = 0; head < choice.done.size(); ++head) {
    choice.done[head] = choice.decided[head] == 0;
  }
  return choice;
}

// Keeps what was decoded before the next prompt. If no prompt follows, nothing is decided.
absl::StatusOr<std::optional<LayerChoice>> TokenSelector::AlignToPrompt(
    const LayerState& state) const {
  absl::StatusOr<Lanes> lanes = Look(/*whole=*/false, /*keys=*/false);
  if (!lanes.ok()) return lanes.status();
  const policies::TokenSpan* const prompt = NextPrompt(state);
  const std::uint64_t from =
      prompt == nullptr ? lanes->begin : std::max(prompt->begin, state.considered_until.load());
  if (prompt != nullptr && (from <= lanes->begin || lanes->begin == lanes->end)) {
    return std::nullopt;
  }
  lanes->CutAt(from);
  LayerChoice choice = About(*lanes, state);
  choice.keeps = true;
  choice.aligns = prompt != nullptr;
  choice.waits = !choice.aligns;
  if (choice.waits) {
    choice.until = state.decided_until;
    choice.refused = state.refused;
  }
  choice.lanes = policies::KeepAll(Shown(options_, layer_, state, *lanes, lanes->begin).view());
  for (std::size_t head = 0; head < choice.done.size(); ++head) {
    choice.done[head] = choice.decided[head] == 0;
  }
  return choice;
}

// Whether the next choice covers the same rows again.
bool TokenSelector::LeavesAllOpen(const Lanes& lanes, const LayerChoice& choice) const {
  const policies::Policy& policy = *options_.policy;
  if (policy.key_channels.has_value()) {
    return std::find(lanes.channels_gone.begin(), lanes.channels_gone.end(), false) !=
           lanes.channels_gone.end();
  }
  if (ChoosesFromAll(policy) || !choice.UntouchedAll()) return false;
  // Rows that are enough for a segment are packed and settled.
  return !policy.mosaic.has_value() ||
         *std::ranges::min_element(choice.decided) < policy.mosaic->segments.min_tokens;
}

// Prunes boundaries between entries that other policies have dropped.
absl::Status TokenSelector::ForgetBoundaries(const Lanes& lanes, LayerChoice& choice) const {
  if (!policies::Merges(*options_.policy)) return absl::OkStatus();
  std::optional<std::vector<cache::OpenRun>> all;
  for (std::size_t head = 0; head < choice.memory.boundaries.size(); ++head) {
    policies::ChunkEnds& ends = choice.memory.boundaries[head];
    if (ends.size() <= lanes.entries[head].before + choice.lanes[head].kept.size() + 1) continue;
    if (!all.has_value()) {
      absl::StatusOr<std::vector<cache::OpenRun>> runs = options_.sequence->LookAt(layer_, true);
      if (!runs.ok()) return runs.status();
      all = *std::move(runs);
    }
    ends = policies::PruneBoundaries(LaneEntryList((*all)[head]).view().positions, ends);
  }
  return absl::OkStatus();
}

// Whether all tokens were decided about before. Their rows may still be open: to be packed, or
// because they end the lane.
bool TokenSelector::NothingNew(const Lanes& lanes, const LayerState& state) const {
  // Policies that continue track this themselves.
  return !policies::Continues(*options_.policy) && state.decided_until > 0 &&
         lanes.end <= state.decided_until;
}

absl::Status TokenSelector::OfLayer(const absl::Status& why) const {
  absl::Status status(why.code(), Concat("layer ", layer_, ": ", why.message()));
  why.ForEachPayload(
      [&](const auto& url, const auto& payload) { status.SetPayload(url, payload); });
  return status;
}

// Whether some lane has more entries than keep all channels, and no earlier rows that fix the
// dropped channels.
bool TokenSelector::NeedsKeyChannels(const Lanes& lanes,
                                     const policies::LayerDecision& decision) const {
  const std::optional<policies::KeyChannelPolicy>& channels = options_.policy->key_channels;
  if (!channels.has_value()) return false;
  for (std::size_t head = 0; head < decision.size(); ++head) {
    if (!lanes.channels_gone[head] && decision[head].kept.size() > channels->recent) return true;
  }
  return false;
}

// Decides by the entries that the other layer holds; its length and its last choice may differ by
// now.
absl::StatusOr<LayerChoice> TokenSelector::TakeOver(std::uint32_t decides, const LayerState& theirs,
                                                    const LayerState& state) const {
  absl::StatusOr<Lanes> lanes = Look(/*whole=*/false, /*keys=*/false);
  if (!lanes.ok()) return lanes.status();
  if (NothingNew(*lanes, state)) return Choose(state);
  const std::uint64_t stop = Stop(state);
  const bool stops = stop < lanes->end;
  lanes->CutAt(stop);
  const absl::StatusOr<std::vector<cache::OpenRun>> waiting =
      options_.sequence->LookAt(decides, /*whole=*/false);
  if (!waiting.ok()) return waiting.status();
  // If no rows wait there, the layer is settled up to its end, under whatever policy.
  const bool none_waits = std::ranges::all_of(*waiting, [](const cache::OpenRun& run) {
    return run.provisional_entries() + run.plain_entries() == 0;
  });
  const std::uint64_t settled = none_waits ? waiting->front().first_position : 0;
  const std::uint64_t until = std::max(theirs.decided_until.load(), settled);
  const bool decided = until > lanes->begin || lanes->begin == lanes->end;
  if (!decided && theirs.considered_until < lanes->end) {
    return absl::FailedPreconditionError(
        Concat("layer ", layer_, " adopts the decision of layer ", decides,
               ", which has not been made: this layer has ", lanes->end,
               " tokens, that one has considered ", theirs.considered_until.load(),
               "; compress that layer first"));
  }
  const absl::StatusOr<std::vector<cache::OpenRun>> runs =
      options_.sequence->LookAt(decides, /*whole=*/true);
  if (!runs.ok()) return runs.status();
  if (decided) lanes->CutAt(until);
  LayerChoice choice = About(*lanes, state);
  choice.goes_on = stops && lanes->end == stop;
  choice.waits = !decided;
  if (!decided) {
    choice.until = state.decided_until;
    choice.refused = theirs.refused;
  }
  for (std::uint32_t head = 0; head < lanes->entries.size(); ++head) {
    const LaneEntryList seen((*runs)[head]);
    const std::span<const std::uint64_t> stay = seen.view().positions;
    const std::span<const std::uint64_t> positions = lanes->entries[head].positions;
    policies::LaneDecision& lane = choice.lanes.emplace_back();
    auto next = stay.begin();  // both ascend
    for (std::uint32_t i = 0; i < positions.size(); ++i) {
      while (next != stay.end() && *next < positions[i]) ++next;
      if (!decided || (next != stay.end() && *next == positions[i])) lane.kept.push_back(i);
    }
  }
  return choice;
}

absl::Status TokenSelector::Refit(LayerChoice& choice) const {
  const absl::StatusOr<Lanes> lanes = Look(ChoosesFromAll(*options_.policy), /*keys=*/false);
  if (!lanes.ok()) return lanes.status();
  const std::vector<std::uint64_t> left = lanes->CountsBefore(choice.cut_at);
  const std::vector<std::uint64_t> first = lanes->FirstPositions();
  for (std::uint32_t head = 0; head < choice.lanes.size(); ++head) {
    if (choice.done[head]) continue;
    // If all covered entries are gone, the present ones were added later.
    const bool gone = choice.first_positions[head] >= choice.cut_at;
    choice.decided[head] = gone ? 0 : std::min(choice.decided[head], left[head]);
    choice.KeepFirst(head, choice.decided[head]);
    if (choice.decided[head] == 0) {
      choice.first_positions[head] = first[head];
    } else if (choice.first_positions[head] != first[head]) {
      return absl::AbortedError(Concat("layer ", layer_, ": undecided entries begin at ",
                                       first[head], " instead of ", choice.first_positions[head],
                                       ", where the interrupted choice began; retry"));
    }
    choice.losses[head] = lanes->losses[head];
  }
  choice.cut_at = LayerChoice::kNotCut;
  return absl::OkStatus();
}

}  // namespace tessera::compaction
