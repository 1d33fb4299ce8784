// The "choose-tokens" job: decides for a layer which entries and key channels are kept, and carries
// the decision out lane by lane.

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/base/expected_tokens.h"
#include "daemon/base/strings.h"
#include "daemon/compaction/jobs/compactor.h"
#include "daemon/compaction/jobs/compactor_jobs.h"
#include "daemon/compaction/lanes/entry_dropper.h"
#include "kernels/tokens/counts.h"

namespace tessera::compaction {

using policies::Policy;

namespace {

// Queries kept in addition to the newest ones, because a step may take back this many tokens.
constexpr std::uint64_t kTakenBack = 32;

absl::Status AsksForNothing(const cache::Sequence& sequence, const Policy& policy) {
  return absl::FailedPreconditionError(Concat(sequence.id().ToString(), " has the policy ",
                                              Quoted(policy.text),
                                              ", which does not need this observation"));
}

// Drops observations that no later decision needs: those of decided tokens, and, if tokens wait for
// a longer prompt, all but the newest.
void Forget(const Policy& policy, const LayerChoice& choice, Observation& observation) {
  if (!choice.waits) return observation.ForgetBefore(choice.until);
  const policies::Needs needs = policies::NeedsOf(policy);
  if (needs.norm_share > 0 || needs.attention_sums) return;
  if (!policy.key_channels.has_value()) observation.ForgetBefore(choice.until);
  if (needs.decode_queries) return;
  const std::uint64_t newest = std::max<std::uint64_t>(
      needs.last_queries,
      kernels::CountUp(needs.last_share * static_cast<double>(ExpectedTokens(choice.end))));
  observation.KeepNewest(newest + kTakenBack);
}

// Whether a lane without packed rows now has enough rows for a segment, or may have its first coded
// rows. This happens with policies that continue while decoding, after a short first prompt.
bool FirstForm(const Policy& policy, const cache::OpenRun& run,
               const policies::LaneDecision& decision) {
  if (policy.uses_books()) {
    return policies::Continues(policy) &&
           std::ranges::none_of(run.settled, [](const cache::HeldSegment& held) {
             return held.segment->rotations() != nullptr || held.segment->shape().packed();
           });
  }
  return policy.mosaic.has_value() && policies::Continues(policy) && run.packed == nullptr &&
         run.provisional_entries() + run.plain_entries() > 0 &&
         decision.kept.size() >= policy.mosaic->segments.min_tokens;
}

}  // namespace

// ---- Observations

absl::Status Compactor::Observe(cache::Sequence& sequence, const ObservedLayer& shown) {
  const std::shared_ptr<ManagedSequence> managed = ManagedSequence::Of(sequence);
  const Policy none;
  const Policy& policy = managed == nullptr ? none : managed->policy();
  if (!policy.chooses()) return AsksForNothing(sequence, policy);
  ManagedSequence::ManagedLayer& layer = managed->layer(shown.layer);
  MutexLock lock(layer.mutex);
  absl::Status status =
      layer.state.observation.Take(shown, policies::NeedsOf(policy), sequence.model(),
                                   *options_.operations, *sequence.memory().observations);
  if (status.ok()) {
    counters_.shown_bytes.fetch_add(BytesOf(shown, sequence.model().geometry(shown.layer)),
                                    std::memory_order_relaxed);
  }
  return status;
}

absl::StatusOr<std::uint64_t> Compactor::NormsFrom(const cache::Sequence& sequence,
                                                   std::uint32_t layer) const {
  const std::shared_ptr<ManagedSequence> managed = ManagedSequence::Of(sequence);
  if (managed == nullptr) return 0;
  const std::vector<policies::TokenSpan> prompts = managed->prompts();
  return TokenSelector({.sequence = &sequence, .policy = &managed->policy(), .prompts = prompts},
                       layer)
      .NormsFrom();
}

absl::Status Compactor::ObserveTokens(cache::Sequence& sequence, std::uint64_t first_token,
                                      std::span<const std::uint32_t> ids) {
  const std::shared_ptr<ManagedSequence> managed = ManagedSequence::Of(sequence);
  const Policy none;
  const Policy& policy = managed == nullptr ? none : managed->policy();
  if (!policies::NeedsOf(policy).token_ids) return AsksForNothing(sequence, policy);
  managed->TakeTokenIds(first_token, ids, sequence.model());
  return absl::OkStatus();
}

// ---- Jobs

// Layers that share a decision go into one job; the deciding layer is first.
void Compactor::QueueChoices(const std::shared_ptr<cache::Sequence>& sequence,
                             const std::shared_ptr<ManagedSequence>& managed, const Rows& rows,
                             JobPriority priority, const std::shared_ptr<Batch>& batch) {
  std::vector<std::uint32_t> together;
  const auto queue = [&] {
    if (together.empty()) return;
    for (const std::uint32_t layer : together) managed->layer(layer).pending.fetch_add(1);
    QueueChoice(sequence, managed, std::exchange(together, {}), priority, Ticket(batch));
  };
  for (std::uint32_t layer = rows.first_layer; layer < rows.first_layer + rows.layers; ++layer) {
    // While decoding, one queued job per layer is enough.
    if (priority == JobPriority::kTails && managed->layer(layer).pending.load() > 0) continue;
    if (policies::DecidesFor(managed->policy(), layer) == layer) queue();
    together.push_back(layer);
  }
  queue();
}

void Compactor::QueueChoice(const std::shared_ptr<cache::Sequence>& sequence,
                            const std::shared_ptr<ManagedSequence>& asker,
                            std::vector<std::uint32_t> layers, JobPriority priority,
                            Ticket ticket) {
  options_.scheduler->Submit(
      {.name = "choose-tokens",
       .priority = priority,
       .tenant = internal::TenantOf(*sequence),
       .owner = sequence->id().value()},
      [this, weak = std::weak_ptr(sequence), asked = std::weak_ptr(asker),
       layers = std::move(layers), priority, ticket = std::move(ticket)]() mutable {
        const std::shared_ptr<cache::Sequence> held = weak.lock();
        const std::shared_ptr<ManagedSequence> managed = asked.lock();
        const std::shared_ptr<ManagedSequence> now =
            held == nullptr ? nullptr : ManagedSequence::Of(*held);
        if (held == nullptr || !held->TokensOfLayer(0).ok()) return;
        // The sequence has another policy now.
        if (now == nullptr || now != managed) {
          if (ticket.waited_for()) ticket.Report(internal::PolicyChanged(*held));
          return;
        }
        const std::uint32_t decides = policies::DecidesFor(managed->policy(), layers.front());
        if (decides != layers.front() && managed->layer(decides).pending.load() > 0) {
          // The layer whose decision these adopt must be done first.
          QueueChoice(held, managed, std::move(layers), priority, std::move(ticket));
          return;
        }
        // Keeps the sequence resident while the choice is carried out lane by lane.
        absl::StatusOr<cache::Residence> stays = held->Restore();
        for (const std::uint32_t layer : layers) {
          managed->layer(layer).pending.fetch_sub(1);
          absl::Status status = stays.status();
          if (status.ok()) {
            status = Choose(*held, *managed,
                            {.index = layer,
                             .all_shown = ticket.all_shown(),
                             .amid_steps = ticket.amid_steps(),
                             .decoding = priority == JobPriority::kTails,
                             .asked = ticket.waited_for()});
          }
          if (status.ok() && ticket.waited_for()) status = Tidy(*held, *managed, layer);
          if (ticket.waited_for()) {
            ticket.Report(status);
          } else if (!status.ok() && !absl::IsNotFound(status)) {
            Complain(*held, "tokens not chosen", status);
          }
        }
        if (stays.ok()) stays->Reset();  // before the waiter continues
        ticket.Finish();
      });
}

void Compactor::QueueKeepDecoded(const std::shared_ptr<cache::Sequence>& sequence,
                                 const std::shared_ptr<ManagedSequence>& managed,
                                 std::uint32_t layer) {
  // Every lane requests this, but one queued job is enough.
  if (managed->layer(layer).pending.load() > 0) return;
  managed->layer(layer).pending.fetch_add(1);
  options_.scheduler->Submit(
      {.name = "seal",
       .priority = JobPriority::kSeals,
       .tenant = internal::TenantOf(*sequence),
       .owner = sequence->id().value()},
      [this, weak = std::weak_ptr(sequence), asked = std::weak_ptr(managed), layer]() {
        const std::shared_ptr<cache::Sequence> held = weak.lock();
        const std::shared_ptr<ManagedSequence> asker = asked.lock();
        if (held == nullptr || asker == nullptr || ManagedSequence::Of(*held) != asker) return;
        absl::StatusOr<cache::Residence> stays = held->Restore();
        asker->layer(layer).pending.fetch_sub(1);
        absl::Status status = stays.status();
        if (status.ok()) {
          status = Choose(*held, *asker,
                          {.index = layer,
                           .all_shown = false,
                           .amid_steps = true,
                           .decoding = true,
                           .keeps_decoded = true});
        }
        if (!status.ok() && !absl::IsNotFound(status)) {
          Complain(*held, "segment not sealed", status);
        }
      });
}

// What a caller finds must not depend on which background jobs have run.
absl::Status Compactor::Tidy(cache::Sequence& sequence, ManagedSequence& managed,
                             std::uint32_t layer) {
  const Policy& policy = managed.policy();
  const shm::LaneLayout& layout = sequence.model().layout();
  if (!policy.uses_books() && !HasStops(policy)) return absl::OkStatus();
  for (std::uint32_t head = 0; head < layout.kv_heads(layer); ++head) {
    const std::uint32_t lane = layout.lane(layer, head);
    absl::Status status;
    if (policy.uses_books()) {
      status = EncodeTiles(sequence.shared_from_this(), lane, /*waits=*/true);
    }
    if (status.ok()) status = JoinPlain(sequence, managed, lane);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Compactor::EncodeBefore(cache::Sequence& sequence, const TokenSelector& chooser,
                                     std::uint32_t layer, const LayerState& state) {
  const absl::StatusOr<bool> encodes = chooser.EncodesFirst(state);
  if (!encodes.ok()) return encodes.status();
  const shm::LaneLayout& layout = sequence.model().layout();
  for (std::uint32_t head = 0; *encodes && head < layout.kv_heads(layer); ++head) {
    absl::Status status = EncodeTiles(sequence.shared_from_this(), layout.lane(layer, head),
                                      /*waits=*/true, /*for_choice=*/true);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// ---- One layer

absl::Status Compactor::Choose(cache::Sequence& sequence, ManagedSequence& managed,
                               AskedLayer asked) {
  const std::uint32_t index = asked.index;
  ManagedSequence::ManagedLayer& layer = managed.layer(index);
  MutexLock lock(layer.mutex);
  // A job that begins after SetPolicy must follow the new policy.
  if (ManagedSequence::Of(sequence).get() != &managed) return internal::PolicyChanged(sequence);
  for (int attempt = 0;;) {
    const bool resumes = layer.unfinished.has_value();
    absl::StatusOr<LayerChoice> choice = resumes ? *std::exchange(layer.unfinished, std::nullopt)
                                                 : ChoiceOf(sequence, managed, asked, layer.state);
    const std::uint32_t lanes = sequence.model().layout().kv_heads(index);
    if (!choice.ok()) {
      Note(layer.left_dense, DenseBecause(choice.status()), lanes);
      return choice.status();
    }
    absl::Status status = Refit(sequence, managed, index, *choice);
    if (status.ok()) status = CarryOut(sequence, managed, index, *choice);
    for (std::uint32_t head = 0; head < lanes; ++head) {
      OnLaneReleased(sequence.shared_from_this(), managed,
                     sequence.model().layout().lane(index, head));
    }
    if (status.ok()) {
      if (std::optional<DenseRows> left = choice->LeftDense(managed.policy())) {
        Note(layer.left_dense, *std::move(left), lanes);
      }
      const bool decides = choice->until > layer.state.decided_until;
      layer.state.memory = choice->memory;
      layer.state.decided_until = choice->until;
      layer.interrupted = false;
      if (!choice->keeps) {
        if (decides) counters_.decisions_made.fetch_add(1, std::memory_order_relaxed);
        const bool chose = !choice->UntouchedAll() || !choice->memory.scores.empty();
        if (chose) layer.state.depends_until = choice->until;
        layer.state.considered_until = std::max(layer.state.considered_until.load(), choice->end);
        layer.state.refused = choice->refused;
        Forget(managed.policy(), *choice, layer.state.observation);
      }
      if (!resumes && !choice->aligns && !choice->goes_on) return choice->refused;
      continue;  // with newer tokens, or those after the ones that it covers
    }
    const bool again = absl::IsAborted(status);
    if (choice->begun && !(resumes && again)) {
      layer.unfinished = *std::move(choice);
    } else if (choice->begun) {
      layer.state.memory.boundaries = choice->BoundariesNow(layer.state.memory);
    }
    layer.interrupted = layer.unfinished.has_value();
    if (absl::IsResourceExhausted(status)) Note(layer.left_dense, DenseBecause(status), lanes);
    if (!again || ++attempt == internal::kAttempts) return status;
  }
}

absl::StatusOr<LayerChoice> Compactor::ChoiceOf(cache::Sequence& sequence, ManagedSequence& managed,
                                                AskedLayer asked, const LayerState& state) {
  const Clock::TimePoint begun = options_.clock->Now();
  absl::StatusOr<LayerChoice> choice = Choice(sequence, managed, asked, state);
  const Clock::Duration spent = options_.clock->Now() - begun;
  counters_.decision_ns.fetch_add(
      static_cast<std::uint64_t>(
          std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count()),
      std::memory_order_relaxed);
  return choice;
}

absl::StatusOr<LayerChoice> Compactor::Choice(cache::Sequence& sequence, ManagedSequence& managed,
                                              AskedLayer asked, const LayerState& state) {
  // A choice of the previous policy may have moved entries since this policy was set.
  if (policies::UsesUnrotatedKeys(managed.policy()) && sequence.HasMoved()) {
    return internal::MovedPositions(sequence);
  }
  const std::vector<policies::TextMark> text = managed.text();
  TokenSelector::Options options = {.sequence = &sequence,
                                    .policy = &managed.policy(),
                                    .text = text,
                                    .all_shown = asked.all_shown,
                                    .decoding = asked.decoding,
                                    .asked = asked.asked,
                                    .open_step = asked.amid_steps ? &managed.open_step() : nullptr};
  std::vector<policies::TokenSpan> prompts = managed.prompts();
  for (;;) {
    options.prompts = prompts;
    const TokenSelector chooser(options, asked.index);
    absl::StatusOr<LayerChoice> choice = ChoiceBy(chooser, sequence, managed, asked, state);
    // A prompt is known before its rows become visible. If the rows of the choice include some of a
    // prompt that was unknown, it may have an earlier stop now.
    const std::uint64_t stop = chooser.Stop(state);
    std::vector<policies::TokenSpan> now = managed.prompts();
    options.prompts = now;
    if (TokenSelector(options, asked.index).Stop(state) == stop) return choice;
    prompts = std::move(now);
  }
}

absl::StatusOr<LayerChoice> Compactor::ChoiceBy(const TokenSelector& chooser,
                                                cache::Sequence& sequence, ManagedSequence& managed,
                                                AskedLayer asked, const LayerState& state) {
  const std::uint32_t index = asked.index;
  if (asked.keeps_decoded) return chooser.KeepDecoded(state);
  if (absl::Status status = EncodeBefore(sequence, chooser, index, state); !status.ok()) {
    return status;
  }
  const std::uint32_t decides = policies::DecidesFor(managed.policy(), index);
  if (decides == index || ChoosesByPrompt(managed.policy())) {
    absl::StatusOr<std::optional<LayerChoice>> aligned = chooser.Align(state);
    if (!aligned.ok()) return aligned.status();
    if (aligned->has_value()) return **std::move(aligned);
    if (decides == index) return chooser.Choose(state);
  }
  TESSERA_CHECK(decides < index, "decisions are adopted by later layers");
  ManagedSequence::ManagedLayer& other = managed.layer(decides);
  MutexLock lock(other.mutex);
  if (!other.unfinished.has_value()) return chooser.TakeOver(decides, other.state, state);
  return absl::FailedPreconditionError(
      Concat("layer ", index, " adopts the decision of layer ", decides,
             ", which was interrupted after some of its lanes; compress that layer first"));
}

absl::Status Compactor::Refit(const cache::Sequence& sequence, ManagedSequence& managed,
                              std::uint32_t layer, LayerChoice& choice) {
  if (choice.cut_at == LayerChoice::kNotCut) return absl::OkStatus();
  return TokenSelector({.sequence = &sequence, .policy = &managed.policy()}, layer).Refit(choice);
}

absl::Status Compactor::CarryOut(cache::Sequence& sequence, ManagedSequence& managed,
                                 std::uint32_t layer, LayerChoice& choice) {
  if (!choice.refused.ok()) return absl::OkStatus();
  const Policy& policy = managed.policy();
  if (choice.idle && HasStops(policy)) return absl::OkStatus();
  const shm::LaneLayout& layout = sequence.model().layout();
  // If all rows wait, pack none: otherwise some lanes of the layer might be packed and others not.
  const bool packs =
      policy.mosaic.has_value() || policy.key_channels.has_value() || policy.uses_books();
  if (packs && policy.drops_entries() && choice.waits && choice.UntouchedAll() &&
      choice.key_channels.empty()) {
    return absl::OkStatus();
  }
  std::optional<RopeShift> turner;
  std::optional<cache::PositionMove> moves;
  if (policies::MovesPositions(policy) || policies::UsesUnrotatedKeys(policy)) {
    turner.emplace(sequence.model().spec().RopeOf(layer), layout.tile(layer));
  }
  if (policies::MovesPositions(policy)) {
    // All layers keep the same number of entries. When all layers are done, the next token's
    // position follows them (Sequence::AdoptMoves).
    moves = {.shift = choice.until - choice.lanes.front().kept.size(), .until = choice.until};
  }
  // Lanes that keep everything are settled with the others, so that the next choice finds the lanes
  // of the layer alike.
  const bool settles =
      !ChoosesFromAll(policy) && policy.drops_entries() &&
      (!choice.UntouchedAll() || choice.aligns ||
       ((LeavesRows(policy) || policy.mosaic.has_value() || policy.uses_books()) && !choice.waits));
  for (std::uint32_t head = 0; head < layout.kv_heads(layer); ++head) {
    if (choice.done[head] || (choice.Untouched(head) && !settles && LeavesRows(policy))) continue;
    const std::uint32_t index = layout.lane(layer, head);
    ManagedLane& lane = managed.lane(index);
    MutexLock lock(lane.work->mutex);
    LaneCoder::Options coding = CoderOptions(sequence, managed, lane.state);
    if (settles || !choice.Untouched(head)) coding.decision = &choice.lanes[head];
    if (!choice.key_channels.empty()) coding.key_channels = &choice.key_channels[head];
    coding.decided = choice.decided[head];
    coding.settles = !ChoosesFromAll(policy);
    if (turner.has_value()) {
      (moves.has_value() ? coding.turning.moved : coding.turning.merged) = &*turner;
    }
    coding.first_position = choice.first_positions[head];
    std::optional<DenseRows> left;
    const absl::Status status = sequence.Recode(
        {.lane = index, .whole = ChoosesFromAll(policy), .counted = CounterOf(policy)},
        [&](const cache::OpenRun& run) -> LaneCoder::Swap {
          if (run.losses != choice.losses[head]) {
            return absl::AbortedError(
                Concat("lane ", index, " of ", sequence.id().ToString(),
                       " was truncated while its entries were chosen; retry"));
          }
          if (coding.turning.merged != nullptr && sequence.HasMoved()) {
            return internal::MovedPositions(sequence);
          }
          if (moves.has_value()) {
            if (coding.decision == nullptr) return std::nullopt;
            LaneCoder::Swap swap = LaneCoder(coding, run).Retain();
            if (swap.ok()) (*swap)->moves = moves;
            return swap;
          }
          // Settled rows keep their form and their segments.
          const bool first = FirstForm(policy, run, choice.lanes[head]);
          if (!first &&
              (choice.continued || (policies::Continues(policy) && !run.settled.empty()))) {
            if (coding.decision == nullptr) return std::nullopt;
            return EntryDropper(sequence.memory(), run).Keep(*coding.decision, coding.decided);
          }
          if (first) coding.decision = &choice.lanes[head];
          LaneCoder coder(coding, run);
          if (policy.uses_books() && coding.decision != nullptr) return coder.RetainWithBook();
          if (!packs || policy.uses_books()) {
            return coding.decision != nullptr ? coder.Retain() : coder.EncodeTiles();
          }
          LaneCoder::Swap swap =
              policy.mosaic.has_value() ? coder.Seal(SealRequest::Everything()) : coder.CutKeys();
          left = coder.left_dense();
          return swap;
        });
    if (!status.ok()) return status;
    if (left.has_value()) Note(lane.left_dense, *std::move(left), 1);
    choice.done[head] = choice.begun = true;
  }
  return absl::OkStatus();
}

}  // namespace tessera::compaction
