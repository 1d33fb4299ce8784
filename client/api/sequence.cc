#include "tessera/sequence.h"

#include <algorithm>
#include <utility>

#include "client/api/lease_core.h"
#include "client/sequence/bulk_append.h"
#include "client/sequence/sequence_state.h"
#include "client/session/session.h"
#include "daemon/base/check.h"
#include "kernels/dispatch/implementation.h"

namespace tessera::client {

namespace {

// What nearly every call needs: the session, and the sequence to itself.
struct Hold {
  std::shared_ptr<Session> session;
  SequenceUse use;
};

absl::StatusOr<Hold> Take(const std::shared_ptr<Core>& core,
                          const std::shared_ptr<SequenceState>& state) {
  TESSERA_CHECK(state != nullptr, "a call through an empty sequence handle");
  absl::StatusOr<SequenceUse> use = SequenceUse::Take(state);
  if (!use.ok()) return use.status();
  absl::StatusOr<std::shared_ptr<Session>> session = core->session();
  if (!session.ok()) return session.status();
  return Hold{*std::move(session), *std::move(use)};
}

// For calls that others see the rows of.
absl::StatusOr<Hold> TakeWithoutAbandonedRows(const std::shared_ptr<Core>& core,
                                              const std::shared_ptr<SequenceState>& state) {
  absl::StatusOr<Hold> hold = Take(core, state);
  if (!hold.ok()) return hold;
  if (absl::Status cut = CutAbandonedRows(*hold->session, *state); !cut.ok()) return cut;
  return hold;
}

}  // namespace

Sequence::Sequence(std::shared_ptr<Core> core, std::shared_ptr<SequenceState> state)
    : core_(std::move(core)), state_(std::move(state)) {}

Sequence& Sequence::operator=(Sequence&& other) noexcept {
  if (this != &other) {
    (void)Release();
    core_ = std::move(other.core_);
    state_ = std::move(other.state_);
  }
  return *this;
}

Sequence::~Sequence() { (void)Release(); }

SequenceId Sequence::id() const { return state_ == nullptr ? SequenceId() : state_->id; }

std::uint64_t Sequence::tokens() const { return state_ == nullptr ? 0 : state_->tokens; }

std::uint64_t Sequence::next_position() const {
  return state_ == nullptr ? 0 : state_->tokens - state_->position_shift;
}

absl::StatusOr<std::uint64_t> Sequence::Append(const AppendTensors& tensors) {
  absl::StatusOr<Hold> hold = Take(core_, state_);
  if (!hold.ok()) return hold.status();
  const auto ended = [&](bool compressed) {
    if (!state_->has_policy()) return;
    state_->prompt_end.Ended(tensors.first_layer, tensors.layers,
                             state_->TokensOf(tensors.first_layer), state_->model->layers(),
                             compressed);
  };
  if (!tensors.end_of_prompt || state_->observer == nullptr) {
    absl::StatusOr<std::uint64_t> tokens = BulkAppend(*hold->session, *hold->use, tensors);
    if (tensors.end_of_prompt && tokens.ok()) ended(/*compressed=*/false);
    return tokens;
  }
  // The rows first: what was seen is of tokens that the daemon holds.
  AppendTensors rows = tensors;
  rows.end_of_prompt = false;
  absl::StatusOr<std::uint64_t> tokens = BulkAppend(*hold->session, *hold->use, rows);
  if (!tokens.ok()) return tokens;
  if (absl::Status status = Compress(*hold->session, tensors.first_layer, tensors.layers).status();
      !status.ok()) {
    return status;
  }
  ended(/*compressed=*/true);
  return tokens;
}

const std::string& Sequence::policy() const { return state_->policy; }

const v1::PolicyNeeds& Sequence::needs() const {
  return state_->observer == nullptr ? v1::PolicyNeeds::default_instance()
                                     : state_->observer->needs();
}

absl::Status Sequence::Observe(const ObservedRows& rows) {
  absl::StatusOr<Hold> hold = Take(core_, state_);
  if (!hold.ok()) return hold.status();
  if (state_->observer == nullptr) return absl::OkStatus();
  return state_->observer->See(rows, kernels::OperationsOf(kernels::BestImplementation()));
}

absl::Status Sequence::ObserveTokens(std::uint64_t first_token,
                                     std::span<const std::uint32_t> ids) {
  absl::StatusOr<Hold> hold = Take(core_, state_);
  if (!hold.ok()) return hold.status();
  if (state_->observer == nullptr) return absl::OkStatus();
  return state_->observer->SeeTokens(first_token, ids);
}

absl::StatusOr<v1::CompressResponse> Sequence::Compress(const Packing& packing,
                                                        const RotationTensors& rotations) {
  absl::StatusOr<Hold> hold = TakeWithoutAbandonedRows(core_, state_);
  if (!hold.ok()) return hold.status();
  return CompressByRpc(*hold->session, *state_->model, state_->id, packing, rotations);
}

absl::StatusOr<v1::CompressResponse> Sequence::Compress() {
  absl::StatusOr<Hold> hold = TakeWithoutAbandonedRows(core_, state_);
  if (!hold.ok()) return hold.status();
  return Compress(*hold->session, 0, 0);
}

absl::Status Sequence::EndPrompt() {
  absl::StatusOr<Hold> hold = TakeWithoutAbandonedRows(core_, state_);
  if (!hold.ok()) return hold.status();
  absl::Status status = Compress(*hold->session, 0, 0, How::kMark).status();
  if (status.ok() && state_->has_policy()) {
    const std::uint32_t layers = state_->model->layers();
    state_->prompt_end.Ended(0, layers, state_->tokens, layers, /*compressed=*/false);
  }
  return status;
}

namespace {

// Of calls for some layers each, one after another.
void AddPart(const v1::CompressResponse& part, bool first, v1::CompressResponse& all) {
  if (first) {
    all = part;
    return;
  }
  all.set_entries_packed(all.entries_packed() + part.entries_packed());
  all.set_entries_dropped(all.entries_dropped() + part.entries_dropped());
  all.set_tile_bytes_after(part.tile_bytes_after());
  all.set_rotation_bytes(part.rotation_bytes());
  all.set_position_shift(part.position_shift());
  all.mutable_decided_tokens()->MergeFrom(part.decided_tokens());
  for (const v1::OutcomeGroup& group : part.outcomes()) {
    const auto same = std::ranges::find_if(*all.mutable_outcomes(), [&](const auto& other) {
      return other.worst().state() == group.worst().state() &&
             other.worst().reason() == group.worst().reason();
    });
    if (same == all.mutable_outcomes()->end()) {
      *all.add_outcomes() = group;
      continue;
    }
    const std::uint32_t lanes = same->lanes() + group.lanes();
    if (group.worst().loss() > same->worst().loss()) *same = group;
    same->set_lanes(lanes);
  }
}

}  // namespace

absl::StatusOr<v1::CompressResponse> Sequence::Compress(Session& session, std::uint32_t first_layer,
                                                        std::uint32_t layers, How how) {
  Observer* const observer = state_->observer.get();
  v1::CompressRequest request;
  v1::CompressResponse response;
  request.set_sequence_id(state_->id.value());
  request.set_first_layer(first_layer);
  request.set_layers(layers);
  const std::uint32_t end = layers == 0 ? state_->model->layers() : first_layer + layers;
  for (std::uint32_t layer = first_layer; layer < end && observer != nullptr; ++layer) {
    observer->CutLayerTo(state_->TokensOf(layer), layer);
  }
  for (std::uint32_t begin = first_layer;;) {
    std::uint32_t shown = end;
    if (observer != nullptr) {
      // Where the daemon has no room for all of it, it decides about what it was shown before it
      // is shown the rest.
      const auto until = observer->Show(session, state_->id, begin, end, state_->TokensOf(0),
                                        /*to_another=*/how == How::kToAnother);
      if (!until.ok()) return until.status();
      shown = *until;
    }
    if (begin != first_layer || shown != end) {
      request.set_first_layer(begin);
      request.set_layers(shown - begin);
    }
    v1::CompressResponse part;
    request.set_end_prompt(how == How::kMark && shown == end);
    if (absl::Status status = session.Call(request, part); !status.ok()) return status;
    if (request.end_prompt()) return part;
    for (std::uint32_t layer = begin; observer != nullptr && layer < shown; ++layer) {
      const std::uint64_t tokens = state_->TokensOf(layer);
      const auto at = static_cast<int>(layer - begin);
      if (tokens == 0) continue;
      observer->Decided(layer, at < part.decided_tokens_size() ? part.decided_tokens(at) : tokens);
    }
    AddPart(part, begin == first_layer, response);
    if (shown == end) break;
    begin = shown;
  }
  if (first_layer == 0 && end == state_->model->layers()) {
    if (state_->prompt_waits) WarnOfNoEffect(response);
    state_->compressed_at = state_->tokens;
    state_->prompt_waits = false;
  }
  state_->position_shift = response.position_shift();
  return response;
}

void Sequence::WarnOfNoEffect(const v1::CompressResponse& response) {
  // Such a policy begins when its budget is full.
  const Observer* const observer = state_->observer.get();
  if (observer != nullptr && observer->needs().acts_while_decoding()) return;
  const auto warning =
      state_->prompt_end.AfterLook(state_->id, state_->policy, state_->tokens, response.outcomes());
  if (warning.has_value()) core_->Warn(*warning);
}

void Sequence::LookAtPromptEnd(Session& session) {
  if (const auto partly = state_->prompt_end.BeforeDecoding(state_->id, state_->tokens)) {
    core_->Warn(*partly);
  }
  if (!state_->prompt_end.WantsLook(state_->tokens)) return;
  v1::DescribeRequest request;
  v1::DescribeResponse response;
  request.set_sequence_id(state_->id.value());
  if (!session.Call(request, response).ok()) response.Clear();
  const auto warning =
      state_->prompt_end.AfterLook(state_->id, state_->policy, state_->tokens, response.outcomes());
  if (warning.has_value()) core_->Warn(*warning);
}

absl::Status Sequence::KeepToBudget() {
  if (state_->observer == nullptr || !state_->observer->needs().acts_while_decoding() ||
      (!state_->prompt_waits && state_->tokens < state_->compressed_at + kernels::kTileEntries)) {
    return absl::OkStatus();
  }
  return Compress().status();
}

absl::StatusOr<Sequence> Sequence::Fork() { return Fork(nullptr); }

absl::StatusOr<Sequence> Sequence::Fork(const std::string& policy) { return Fork(&policy); }

absl::StatusOr<Sequence> Sequence::Fork(const std::string* policy) {
  absl::StatusOr<Hold> hold = TakeWithoutAbandonedRows(core_, state_);
  if (!hold.ok()) return hold.status();
  v1::ForkRequest request;
  v1::ForkResponse response;
  request.set_parent_id(state_->id.value());
  if (policy != nullptr) request.set_policy(*policy);
  if (absl::Status status = hold->session->Call(request, response); !status.ok()) return status;
  auto child = std::make_shared<SequenceState>(SequenceId(response.sequence_id()), state_->model,
                                               response.directory_offset(), response.tokens());
  child->TakePolicy(response);
  child->position_shift = response.position_shift();
  // What the parent has seen and not yet shown is of the child's tokens, too.
  if (state_->observer != nullptr && child->observer != nullptr &&
      state_->observer->Sees(response.needs())) {
    child->observer = std::make_unique<Observer>(*state_->observer);
  }
  if (policy == nullptr) child->compressed_at = state_->compressed_at;
  child->prompt_waits = state_->prompt_waits;
  core_->AddSequence(child);
  return Sequence(core_, std::move(child));
}

absl::StatusOr<PublishedPrefix> Sequence::Publish(std::span<const std::uint32_t> token_ids,
                                                  const PublishOptions& options) {
  absl::StatusOr<Hold> hold = TakeWithoutAbandonedRows(core_, state_);
  if (!hold.ok()) return hold.status();
  if (state_->observer != nullptr) {
    // What was seen must be shown first, and these are the ids of all that is held.
    const auto held = token_ids.first(std::min<std::size_t>(token_ids.size(), state_->tokens));
    absl::Status status = state_->observer->SeeTokens(0, held);
    if (!status.ok()) return status;
    // Whoever begins with them has not seen what this worker has.
    status = Compress(*hold->session, 0, 0, How::kToAnother).status();
    if (!status.ok()) return status;
  }
  v1::PublishRequest request;
  v1::PublishResponse response;
  request.set_sequence_id(state_->id.value());
  request.mutable_token_ids()->Add(token_ids.begin(), token_ids.end());
  request.set_ttl_ms(static_cast<std::uint64_t>(options.ttl.count()));
  request.set_pinned(options.pinned);
  if (absl::Status status = hold->session->Call(request, response); !status.ok()) return status;
  state_->position_shift = response.position_shift();
  return PublishedPrefix{.prefix = PrefixId(response.prefix_id()),
                         .tokens = response.tokens(),
                         .deduplicated = response.deduplicated(),
                         .rebased = response.rebased()};
}

absl::Status Sequence::Truncate(std::uint64_t tokens) {
  absl::StatusOr<Hold> hold = Take(core_, state_);
  if (!hold.ok()) return hold.status();
  // What a refused step left behind is none of its tokens.
  if (tokens > state_->tokens) {
    if (absl::Status cut = CutAbandonedRows(*hold->session, *state_); !cut.ok()) return cut;
  }
  absl::Status status = CutTo(*hold->session, state_->id, tokens);
  if (!status.ok()) return status;
  state_->tail = Tail();
  state_->abandoned_rows = false;
  if (state_->observer != nullptr) state_->observer->CutTo(tokens);
  state_->SetTokens(tokens);
  state_->compressed_at = std::min(state_->compressed_at, tokens);
  if (tokens == 0) state_->prompt_waits = false;
  if (tokens == 0) state_->position_shift = 0;
  return absl::OkStatus();
}

absl::Status Sequence::Park() {
  absl::StatusOr<Hold> hold = Take(core_, state_);
  if (!hold.ok()) return hold.status();
  if (state_->tail.session != hold->session->serial()) return absl::OkStatus();
  const SequenceId ids[] = {state_->id};
  absl::StatusOr<v1::TailsClosed> closed = hold->session->CloseTails(ids);
  if (!closed.ok()) return closed.status();
  state_->tail = Tail();
  return absl::OkStatus();
}

absl::StatusOr<std::uint64_t> Sequence::Offload() {
  absl::StatusOr<Hold> hold = Take(core_, state_);
  if (!hold.ok()) return hold.status();
  v1::OffloadRequest request;
  v1::OffloadResponse response;
  request.set_sequence_id(state_->id.value());
  absl::Status status = hold->session->Call(request, response);
  if (!status.ok()) return status;
  state_->tail = Tail();
  return response.moved_bytes();
}

absl::Status Sequence::Restore() {
  absl::StatusOr<Hold> hold = Take(core_, state_);
  if (!hold.ok()) return hold.status();
  v1::RestoreRequest request;
  v1::RestoreResponse response;
  request.set_sequence_id(state_->id.value());
  return hold->session->Call(request, response);
}

absl::StatusOr<v1::DescribeResponse> Sequence::Describe(bool lanes) const {
  v1::DescribeRequest request;
  request.set_lanes(lanes);
  return Ask(std::move(request));
}

absl::StatusOr<v1::DescribeResponse> Sequence::DescribeEntries() const {
  v1::DescribeRequest request;
  request.set_entries(true);
  return Ask(std::move(request));
}

absl::StatusOr<v1::DescribeResponse> Sequence::Ask(v1::DescribeRequest request) const {
  // Asks, and touches nothing that a step uses: allowed at any time. Only what a refused step left
  // behind is cut off first, where there is any.
  absl::StatusOr<std::shared_ptr<Session>> session = core_->session();
  if (!session.ok()) return session.status();
  if (state_->gone) return SequenceUse::Take(state_).status();
  if (absl::Status cut = CutBeforeReading(**session, state_); !cut.ok()) return cut;
  v1::DescribeResponse response;
  request.set_sequence_id(state_->id.value());
  if (absl::Status status = (*session)->Call(request, response); !status.ok()) return status;
  return response;
}

// Whoever takes it over has not seen what this worker has.
absl::Status Sequence::ShowAll(Session& session) {
  Observer* const observer = state_->observer.get();
  if (observer == nullptr) return absl::OkStatus();
  const std::uint32_t layers = state_->model->layers();
  for (std::uint32_t layer = 0; layer < layers; ++layer) {
    observer->CutLayerTo(state_->TokensOf(layer), layer);
  }
  const auto until = observer->Show(session, state_->id, 0, layers, state_->TokensOf(0),
                                    /*to_another=*/true);
  if (!until.ok() || *until == layers) return until.status();
  return absl::ResourceExhaustedError(Concat("the daemon has room for what was seen of ", *until,
                                             " of ", layers, " layers of ", state_->id.ToString(),
                                             "; compress it, and retry"));
}

absl::Status Sequence::Handover(SessionId to) {
  absl::StatusOr<Hold> hold = TakeWithoutAbandonedRows(core_, state_);
  if (!hold.ok()) return hold.status();
  if (absl::Status shown = ShowAll(*hold->session); !shown.ok()) return shown;
  v1::HandoverRequest request;
  v1::HandoverResponse response;
  request.set_sequence_id(state_->id.value());
  request.set_to_session_id(to.value());
  if (absl::Status status = hold->session->Call(request, response); !status.ok()) return status;
  state_->tail = Tail();
  state_->ended = true;
  return absl::OkStatus();
}

absl::Status Sequence::Free() {
  if (state_ == nullptr || state_->ended || state_->gone) return absl::OkStatus();
  absl::StatusOr<Hold> hold = Take(core_, state_);
  if (!hold.ok()) return hold.status();
  absl::Status status = Release();
  if (!status.ok()) state_->ended = false;
  return status;
}

absl::Status Sequence::Release() {
  if (state_ == nullptr || state_->ended.exchange(true) || state_->gone) return absl::OkStatus();
  absl::StatusOr<std::shared_ptr<Session>> session = core_->session();
  if (!session.ok()) return session.status();  // freed with the session
  v1::FreeRequest request;
  v1::FreeResponse response;
  request.add_sequence_ids(state_->id.value());
  return (*session)->Call(request, response);
}

}  // namespace tessera::client
