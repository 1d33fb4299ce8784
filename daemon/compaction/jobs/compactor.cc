#include "daemon/compaction/jobs/compactor.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "daemon/base/error_cause.h"
#include "daemon/base/strings.h"
#include "daemon/compaction/jobs/compactor_jobs.h"
#include "daemon/compaction/jobs/policy_fits.h"
#include "daemon/policies/plan.h"
#include "kernels/strategy/candidates.h"

namespace tessera::compaction {

using internal::TenantOf;

// ---- Policies

absl::Status Compactor::SetPolicy(cache::Sequence& sequence, policies::Policy policy) {
  if (absl::Status fits = CheckFitsModel(policy, sequence.model()); !fits.ok()) {
    return WithCause(std::move(fits), ErrorCause::kPolicy);
  }
  for (;;) {
    const std::shared_ptr<ManagedSequence> before = ManagedSequence::Of(sequence);
    if (before == nullptr) return ReplacePolicy(sequence, nullptr, std::move(policy));
    if (before->policy().text == policy.text) return absl::OkStatus();
    // LanesHeld below needs them.
    absl::Status status = before->MakeLanes();
    if (!status.ok()) return status;
    {
      // No job of the previous policy may be at work on a lane: its result would be attributed to
      // the next policy.
      const ManagedSequence::Pause pause(*before);
      const ManagedSequence::LanesHeld held(*before);
      if (ManagedSequence::Of(sequence) != before) continue;  // a concurrent call was first
      status = ReplacePolicy(sequence, before.get(), std::move(policy));
    }
    for (std::uint32_t lane = 0; lane < sequence.model().lanes(); ++lane) {
      OnLaneReleased(sequence.shared_from_this(), *before, lane);
    }
    return status;
  }
}

absl::Status Compactor::ReplacePolicy(cache::Sequence& sequence, ManagedSequence* before,
                                      policies::Policy policy) {
  if (absl::Status fits = CheckFitsRows(policy, sequence); !fits.ok()) return fits;
  // If the previous policy moves positions, all layers must have finished moving.
  if (before != nullptr && policies::MovesPositions(before->policy())) {
    if (absl::Status alike = sequence.CheckPositionsAgree(); !alike.ok()) return alike;
  }
  WarnOfSmallBudget(sequence, policy);
  WarnOfShortSegments(sequence, policy);
  if (PolicyOf(sequence).text != policy.text && !sequence.HasOriginalRows())
    sequence.set_has_manual_changes();
  const bool packs = policy.mosaic.has_value();
  const bool idle = policy.dense() && !policy.selection.has_value();
  absl::StatusOr<std::shared_ptr<ManagedSequence>> created =
      ManagedSequence::Create(std::move(policy), sequence.model(), sequence.memory().heap);
  if (!created.ok()) return created.status();
  std::shared_ptr<ManagedSequence> managed = *std::move(created);
  if (before != nullptr || sequence.has_lanes()) {
    if (absl::Status status = managed->MakeLanes(); !status.ok()) return status;
  }
  if (before != nullptr) {
    managed->Follow(*before, sequence);
  } else {
    managed->TakeAsPrompt(sequence.Describe(/*lanes=*/false).tokens, sequence.step_begin());
  }
  // A dense policy without selection needs no managed state, except for known chunk boundaries.
  if (idle && !managed->KnowsChunks()) managed = nullptr;
  sequence.set_companion(std::move(managed));
  // Without packing, rows that wait for a strategy will never get one: their form is final.
  if (!packs) sequence.DropRawRows();
  return absl::OkStatus();
}

// Decoded tokens get a strategy of their own only if the raw copies of a shortest segment fit the
// budget.
void Compactor::WarnOfSmallBudget(const cache::Sequence& sequence, const policies::Policy& policy) {
  if (!policy.mosaic.has_value() || policy.chooses()) return;
  std::uint64_t wanted = 0;
  const shm::LaneLayout& layout = sequence.model().layout();
  for (std::uint32_t layer = 0; layer < layout.layers(); ++layer) {
    wanted += policy.mosaic->segments.min_tokens * 2 * layout.tile(layer).row_bytes() *
              layout.kv_heads(layer);
  }
  const std::uint64_t budget = sequence.memory().raw_copies->limit_bytes();
  if (budget == 0 || wanted <= budget) return;
  if (!small_budgets_.Say(options_.clock->Now()).has_value()) return;
  options_.logger->Log(
      LogLevel::kWarning,
      "the raw copies of a shortest segment do not fit their budget, so decoded tokens keep the "
      "previous segment's strategy; raise raw_copy_bytes, or lower the policy's min_segment",
      {{"sequence", sequence.id().value()},
       {"min_segment", policy.mosaic->segments.min_tokens},
       {"bytes", wanted},
       {"budget", budget}});
}

// Each segment stores its own rotations, a cost that only long segments amortize.
void Compactor::WarnOfShortSegments(const cache::Sequence& sequence,
                                    const policies::Policy& policy) {
  constexpr std::uint64_t kEndless = std::uint64_t{1} << 40;
  if (!policy.mosaic.has_value()) return;
  const kernels::StrategyOptions& strategy = policy.mosaic->strategy;
  const policies::SegmentOptions& segments = policy.mosaic->segments;
  const std::uint64_t shortest = std::min(
      segments.tokens, std::max<std::uint64_t>(segments.min_tokens, kernels::kTileEntries));
  const std::uint32_t block = strategy.blocks.empty() ? 0 : strategy.blocks.back();
  for (std::uint32_t layer = 0; layer < sequence.model().layers(); ++layer) {
    const kernels::LayerGeometry geometry = sequence.model().geometry(layer);
    const std::vector<kernels::Candidate> candidates =
        kernels::ListCandidates(geometry.head_dim, shortest, block, strategy);
    const auto least = std::ranges::min_element(candidates, {}, &kernels::Candidate::bytes);
    const auto dense = static_cast<double>(2 * sequence.model().layout().tile(layer).row_bytes());
    if (least->bytes < dense || !short_segments_.Say(options_.clock->Now()).has_value()) continue;
    const std::vector<kernels::Candidate> endless =
        kernels::ListCandidates(geometry.head_dim, kEndless, block, strategy);
    const bool ever =
        std::ranges::min_element(endless, {}, &kernels::Candidate::bytes)->bytes < dense;
    options_.logger->Log(
        LogLevel::kWarning,
        ever ? "segments so short are larger packed than dense, because rotations take more than "
               "packing saves; raise the policy's segment and min_segment"
             : "packed rows are larger than dense rows at any segment length; lower the policy's "
               "keep",
        {{"sequence", sequence.id().value()},
         {"tokens", shortest},
         {"bytes_per_token", static_cast<std::uint64_t>(least->bytes)},
         {"dense_bytes_per_token", static_cast<std::uint64_t>(dense)}});
    return;
  }
}

absl::StatusOr<std::shared_ptr<cache::Sequence>> Compactor::Fork(const cache::Sequence& parent,
                                                                 ForkFunction fork) {
  for (;;) {
    const std::shared_ptr<ManagedSequence> managed = ManagedSequence::Of(parent);
    if (managed == nullptr) return fork();
    const ManagedSequence::Pause pause(*managed);
    if (ManagedSequence::Of(parent) != managed) continue;  // the policy was replaced
    return ForkPaused(*managed, pause, parent.model(), fork);
  }
}

absl::StatusOr<std::shared_ptr<cache::Sequence>> Compactor::ForkPaused(
    ManagedSequence& managed, const ManagedSequence::Pause& pause, const cache::Model& model,
    ForkFunction fork) {
  // Pending seals are read before the fork, since one may end during it (the fork then has its
  // result), and after it, since one may have arrived with rows that the fork has.
  std::vector<std::optional<SealRequest>> ahead(model.lanes());
  const auto look = [&] {
    for (std::uint32_t lane = 0; lane < ahead.size(); ++lane) {
      const ManagedLane* const held = managed.FindLane(lane);
      if (held == nullptr) return;
      const std::optional<SealRequest> now = held->work->seals.Ahead();
      if (!now.has_value()) continue;
      if (!ahead[lane].has_value()) ahead[lane].emplace();
      ahead[lane]->Join(*now);
    }
  };
  look();
  absl::StatusOr<std::shared_ptr<ManagedSequence>> own = managed.CreateForFork(model);
  if (!own.ok()) return own.status();
  absl::StatusOr<std::shared_ptr<cache::Sequence>> child = fork();
  if (!child.ok()) return child;
  look();
  const std::uint64_t tokens = (*child)->Describe(/*lanes=*/false).tokens;
  (*own)->Inherit(managed, pause, **child, tokens);
  (*child)->set_companion(*own);
  for (std::uint32_t lane = 0; lane < ahead.size(); ++lane) {
    if (!ahead[lane].has_value()) continue;
    ahead[lane]->CutTo(tokens);
    RequestSeal(*child, **own, lane, *ahead[lane]);
  }
  return child;
}

absl::Status Compactor::Truncate(cache::Sequence& sequence, std::uint64_t tokens) {
  for (;;) {
    const std::shared_ptr<ManagedSequence> managed = ManagedSequence::Of(sequence);
    if (managed == nullptr) return TruncateUnmanaged(sequence, tokens);
    const ManagedSequence::Pause pause(*managed);
    if (ManagedSequence::Of(sequence) != managed) continue;  // the policy was replaced
    // Under the sequence's lock, together with the rows: requests for rows that are appended after
    // the cut must not be cut.
    return sequence.Truncate(tokens, [&] { managed->CutTo(sequence, tokens, pause); });
  }
}

absl::Status Compactor::TruncateUnmanaged(cache::Sequence& sequence, std::uint64_t tokens) {
  if (absl::Status status = sequence.Truncate(tokens); !status.ok()) return status;
  const std::shared_ptr<ManagedSequence> now = ManagedSequence::Of(sequence);
  if (now == nullptr) return absl::OkStatus();
  // A policy was set meanwhile and may know the removed tokens.
  const ManagedSequence::Pause pause(*now);
  std::uint64_t held = 0;
  for (std::uint32_t layer = 0; layer < sequence.model().layers(); ++layer) {
    held = std::max(held, sequence.TokensOfLayer(layer).value_or(0));
  }
  now->CutTo(sequence, held, pause);
  return absl::OkStatus();
}

policies::Policy Compactor::PolicyOf(const cache::Sequence& sequence) {
  const std::shared_ptr<ManagedSequence> managed = ManagedSequence::Of(sequence);
  return managed == nullptr ? policies::Policy() : managed->policy();
}

std::uint64_t Compactor::DecidedOf(const cache::Sequence& sequence) {
  const std::shared_ptr<ManagedSequence> managed = ManagedSequence::Of(sequence);
  return managed == nullptr ? 0 : managed->decided_until();
}

std::vector<std::uint64_t> Compactor::DecidedByLayer(const cache::Sequence& sequence) {
  const std::shared_ptr<ManagedSequence> managed = ManagedSequence::Of(sequence);
  return managed == nullptr ? std::vector<std::uint64_t>() : managed->decided_by_layer();
}

kernels::Loss Compactor::LossOf(const cache::Sequence& sequence, std::uint32_t lane) {
  const std::shared_ptr<ManagedSequence> managed = ManagedSequence::Of(sequence);
  return managed == nullptr ? kernels::Loss() : managed->MonitoredLoss(lane);
}

std::optional<kernels::SelectionRule> Compactor::SelectionOf(const cache::Sequence& sequence,
                                                             std::uint32_t layer) {
  const std::shared_ptr<ManagedSequence> managed = ManagedSequence::Of(sequence);
  if (managed == nullptr) return std::nullopt;
  return policies::SelectionOf(managed->policy(), layer);
}

// ---- Events of a sequence

absl::StatusOr<std::uint64_t> Compactor::Append(const std::shared_ptr<cache::Sequence>& sequence,
                                                const Rows& rows, const cache::RowSource& source) {
  const std::shared_ptr<ManagedSequence> managed = ManagedSequence::Of(*sequence);
  std::vector<std::uint32_t> ended;  // lanes that had no pending seal
  const absl::StatusOr<std::uint64_t> tokens =
      sequence->Append({.first_layer = rows.first_layer,
                        .layers = rows.layers,
                        .first_token = rows.first_token,
                        .tokens = rows.until - rows.first_token,
                        .position_shift = rows.position_shift,
                        .decoded = rows.decoded},
                       source, [&] {
                         if (managed == nullptr) return;
                         if (rows.decoded) return managed->TakeStep(rows.first_token, rows.until);
                         managed->TakePrompt(rows.first_token, rows.until);
                         if (rows.end_of_prompt)
                           ended = RequestPromptEnd(*managed, sequence->model(), rows);
                       });
  for (const std::uint32_t lane : ended) QueueSeal(sequence, {.lane = lane}, Ticket(nullptr));
  if (!tokens.ok()) return tokens;
  const std::shared_ptr<ManagedSequence> now = ManagedSequence::Of(*sequence);
  if (now != nullptr && now != managed) {  // the policy was replaced meanwhile
    rows.decoded ? now->TakeStep(rows.first_token, rows.until)
                 : now->TakePrompt(rows.first_token, rows.until);
  }
  if (now != nullptr) {
    AfterAppend(sequence, now, rows, /*end_wanted=*/now == managed && !rows.decoded);
  }
  return tokens;
}

void Compactor::Appended(const std::shared_ptr<cache::Sequence>& sequence, const Rows& rows) {
  const std::shared_ptr<ManagedSequence> managed = ManagedSequence::Of(*sequence);
  if (managed != nullptr) AfterAppend(sequence, managed, rows, /*end_wanted=*/false);
}

// At most one seal job is queued per lane, however often a worker reports the end of a prompt.
void Compactor::AfterAppend(const std::shared_ptr<cache::Sequence>& sequence,
                            const std::shared_ptr<ManagedSequence>& managed, const Rows& rows,
                            bool end_wanted) {
  // Tokens decoded over RPC bypass the tail, but they fill tiles too. Policies that continue while
  // decoding drop tokens for good, so they wait for tokens that a step can no longer take back.
  const bool last_layer = rows.first_layer + rows.layers == sequence->model().layers();
  const bool full =
      policies::Continues(managed->policy())
          ? managed->open_step().PreviousStepFilledTile()
          : rows.first_token / kernels::kTileEntries != rows.until / kernels::kTileEntries;
  if (rows.decoded && last_layer && full) TailsMoved(sequence);
  if (managed->policy().chooses()) {
    // The decision needs the whole prompt. If it moves positions, only Compress may start it (see
    // TailsMoved).
    if (rows.end_of_prompt && !policies::MovesPositions(managed->policy())) {
      QueueChoices(sequence, managed, rows, JobPriority::kSeals, nullptr);
    }
    return;
  }
  if (!managed->policy().mosaic.has_value()) {
    if (rows.end_of_prompt) TailsMoved(sequence);
    return;
  }
  QueueDeferredOf(sequence, *managed);
  if (rows.end_of_prompt) {
    // Append has already requested the seals, under the sequence's lock, so no cut came between.
    if (end_wanted) return;
    for (const std::uint32_t lane : RequestPromptEnd(*managed, sequence->model(), rows)) {
      QueueSeal(sequence, {.lane = lane}, Ticket(nullptr));
    }
    return;
  }
  const shm::LaneLayout& layout = sequence->model().layout();
  for (std::uint32_t layer = rows.first_layer; layer < rows.first_layer + rows.layers; ++layer) {
    const std::uint32_t first = layout.lane(layer, 0);
    if (sequence->OpenEntries(first) < managed->policy().mosaic->segments.tokens) continue;
    for (std::uint32_t lane = first; lane < first + layout.kv_heads(layer); ++lane) {
      RequestSeal(sequence, *managed, lane, {});
    }
  }
}

void Compactor::TailsMoved(const std::shared_ptr<cache::Sequence>& sequence) {
  const std::shared_ptr<ManagedSequence> managed = ManagedSequence::Of(*sequence);
  if (managed == nullptr || managed->policy().dense()) return;
  // The worker must know the position of its next token: positions move only on Compress.
  if (policies::MovesPositions(managed->policy())) return;
  if (policies::Continues(managed->policy())) {
    const Rows all = {.first_layer = 0, .layers = sequence->model().layers()};
    QueueChoices(sequence, managed, all, JobPriority::kTails, nullptr);
    return;
  }
  QueueDeferredOf(sequence, *managed);
  if (managed->WantTiles()) {
    QueueTiles(sequence, {.end = sequence->model().lanes(), .all = true}, Ticket(nullptr));
  }
}

void Compactor::Compress(const std::shared_ptr<cache::Sequence>& sequence, const Rows& rows,
                         Done done) {
  const auto batch = std::make_shared<Batch>(std::move(done), rows);
  // First, because a lane at the segment limit cannot absorb its tail.
  batch->Report(JoinCrowdedLanes(sequence));
  const std::shared_ptr<ManagedSequence> managed = ManagedSequence::Of(*sequence);
  if (managed == nullptr || managed->policy().dense()) return;
  if (managed->policy().chooses()) {
    // The decision includes decoded tokens, because the newest queries belong to the newest tokens.
    if (policies::MovesPositions(managed->policy())) {
      absl::StatusOr<cache::Sequence::TailBlock> shut =
          sequence->BeginMoves(rows.first_layer, rows.layers);
      if (!shut.ok()) return batch->Report(shut.status());
      batch->Hold(*std::move(shut));
    } else {
      batch->Report(sequence->AbsorbTail());
    }
    QueueChoices(sequence, managed, rows, JobPriority::kSeals, batch);
    return;
  }
  // Tokens decoded so far are included.
  batch->Report(sequence->AbsorbTail());
  if (!managed->policy().mosaic.has_value()) {
    QueueTiles(sequence, {.end = sequence->model().lanes(), .all = true, .waiter_policy = managed},
               Ticket(batch));
    return;
  }
  const shm::LaneLayout& layout = sequence->model().layout();
  // Paused, so that no cut comes between reading a layer's tokens and requesting their seals.
  const ManagedSequence::Pause pause(*managed);
  if (ManagedSequence::Of(*sequence) != managed) {
    return batch->Report(internal::PolicyChanged(*sequence));
  }
  for (std::uint32_t layer = rows.first_layer; layer < rows.first_layer + rows.layers; ++layer) {
    const absl::StatusOr<std::uint64_t> tokens = sequence->TokensOfLayer(layer);
    if (!tokens.ok()) {
      batch->Report(tokens.status());
      return;
    }
    if (*tokens == 0) continue;
    const SealRequest all = {.all_before = *tokens};
    for (std::uint32_t head = 0; head < layout.kv_heads(layer); ++head) {
      const std::uint32_t lane = layout.lane(layer, head);
      const std::shared_ptr<LaneWork>& work = managed->lane(lane).work;
      work->seals.Want(all);
      QueueSeal(sequence,
                {.lane = lane,
                 .told = work->seals.Tell(all),
                 .waiter_lane = work,
                 .waiter_policy = managed},
                Ticket(batch));
    }
  }
}

// ---- Lanes

LaneCoder::Options Compactor::CoderOptions(const cache::Sequence& sequence,
                                           ManagedSequence& managed, LaneState& state) {
  return {.memory = &sequence.memory(),
          .model = &sequence.model(),
          .policy = &managed.policy(),
          .state = &state,
          .operations = options_.operations,
          .counters = &counters_};
}

cache::ReplacedBytes* Compactor::CounterOf(const policies::Policy& policy) {
  const std::optional<std::size_t> system = policies::SystemOf(policy);
  return system.has_value() ? &counters_.replaced_by_system[*system] : nullptr;
}

Compactor::ReduceOutcome Compactor::Thin(cache::Sequence& sequence, std::uint64_t bytes) {
  ReduceOutcome outcome;
  const std::shared_ptr<ManagedSequence> managed = ManagedSequence::Of(sequence);
  if (managed == nullptr || !managed->policy().yields_to_pressure()) return outcome;
  outcome.allowed = true;
  for (std::uint32_t i = 0; i < sequence.model().lanes(); ++i) {
    if (outcome.gained.bytes >= bytes) break;
    const absl::StatusOr<ReducedBytes> thinned =
        ReduceLane(sequence, *managed, i, bytes - outcome.gained.bytes);
    if (!thinned.ok()) {
      outcome.hindrance = thinned.status();
      // Without memory the next lane would fail too. Other errors may concern this lane only.
      if (absl::IsResourceExhausted(thinned.status())) break;
      continue;
    }
    outcome.gained.bytes += thinned->bytes;
    outcome.gained.segments += thinned->segments;
  }
  return outcome;
}

absl::StatusOr<ReducedBytes> Compactor::ReduceLane(cache::Sequence& sequence,
                                                   ManagedSequence& managed, std::uint32_t index,
                                                   std::uint64_t bytes) {
  ReducedBytes thinned;
  const auto thin = [&](const cache::OpenRun& run) {
    const policies::Policy& policy = managed.policy();
    ChannelReducer thinner(
        {.memory = &sequence.memory(),
         .operations = options_.operations,
         .share = policy.mosaic.has_value() ? policy.mosaic->pressed : 0,
         .drops_crumbs = policy.planes.has_value() && policy.planes->drops_crumbs,
         .bytes = bytes},
        run);
    absl::StatusOr<std::optional<cache::LaneSwap>> swap = thinner.Thin();
    thinned = thinner.thinned();
    return swap;
  };
  absl::Status status;
  {
    MutexLock lock(managed.lane(index).work->mutex);
    status = ManagedSequence::Of(sequence).get() == &managed
                 ? sequence.Recode(
                       {.lane = index, .whole = true, .counted = CounterOf(managed.policy())}, thin)
                 : internal::PolicyChanged(sequence);
  }
  OnLaneReleased(sequence.shared_from_this(), managed, index);
  if (!status.ok()) return status;
  return thinned;
}

void Compactor::Complain(const cache::Sequence& sequence, std::string_view what,
                         const absl::Status& why) {
  const std::optional<std::uint64_t> unsaid = complaints_.Say(options_.clock->Now());
  if (!unsaid.has_value()) return;
  options_.logger->Log(LogLevel::kWarning, std::string(what),
                       {{"sequence", sequence.id().value()},
                        {"error", AsStringView(why.message())},
                        {"like_this_before", *unsaid}});
}

}  // namespace tessera::compaction
