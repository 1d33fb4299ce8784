#include "tessera/sequence.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "client/api/answers.h"
#include "client/api/lease_core.h"
#include "client/api/worker_access.h"
#include "client/error/error_info.h"
#include "client/sequence/bulk_append.h"
#include "client/sequence/compression.h"
#include "client/sequence/policy_compression.h"
#include "client/sequence/sequence_access.h"
#include "client/session/session.h"
#include "daemon/base/strings.h"
#include "kernels/dispatch/implementation.h"

namespace tessera::client {

namespace {

// The session and exclusive use of the sequence, which almost every call needs.
struct Hold {
  std::shared_ptr<Session> session;
  SequenceUse use;
};

absl::Status EmptyHandle(std::string_view call) {
  return BadArgument(call, "the sequence is an empty handle (default-constructed or moved from)");
}

absl::StatusOr<Hold> Take(std::string_view call, const std::shared_ptr<Core>& core,
                          const std::shared_ptr<SequenceState>& state) {
  if (state == nullptr) return EmptyHandle(call);
  absl::StatusOr<SequenceUse> use = SequenceUse::Take(state);
  if (!use.ok()) return use.status();
  absl::StatusOr<std::shared_ptr<Session>> session = core->session();
  if (!session.ok()) return session.status();
  return Hold{*std::move(session), *std::move(use)};
}

// For calls that make the rows visible to other sequences or workers.
absl::StatusOr<Hold> TakeWithoutAbandonedRows(std::string_view call,
                                              const std::shared_ptr<Core>& core,
                                              const std::shared_ptr<SequenceState>& state) {
  absl::StatusOr<Hold> hold = Take(call, core, state);
  if (!hold.ok()) return hold;
  if (absl::Status cut = CutAbandonedRows(*hold->session, *state); !cut.ok()) return cut;
  return hold;
}

// Passes the sequence's warning on to the worker.
void Warn(Core& core, SequenceState& sequence) {
  if (const auto warning = std::exchange(sequence.warning, std::nullopt)) core.Warn(*warning);
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
  absl::StatusOr<Hold> hold = Take("Sequence::Append", core_, state_);
  if (!hold.ok()) return hold.status();
  const auto ended = [&](bool compressed) {
    if (!state_->has_policy()) return;
    state_->prompt_end.MarkEnded(tensors.first_layer, tensors.layers,
                                 state_->TokensOf(tensors.first_layer), state_->model->layers(),
                                 compressed);
  };
  if (!tensors.end_of_prompt || state_->observer == nullptr) {
    absl::StatusOr<std::uint64_t> tokens = BulkAppend(*hold->session, *hold->use, tensors);
    if (tensors.end_of_prompt && tokens.ok()) ended(/*compressed=*/false);
    return tokens;
  }
  // Append the rows first: observations refer to tokens that the daemon holds.
  AppendTensors rows = tensors;
  rows.end_of_prompt = false;
  absl::StatusOr<std::uint64_t> tokens = BulkAppend(*hold->session, *hold->use, rows);
  if (!tokens.ok()) return tokens;
  absl::Status status =
      CompressByPolicy(*hold->session, *state_, tensors.first_layer, tensors.layers).status();
  if (!status.ok()) return status;
  Warn(*core_, *state_);
  ended(/*compressed=*/true);
  return tokens;
}

const std::string& Sequence::policy() const {
  static const std::string none;
  return state_ == nullptr ? none : state_->policy;
}

PolicyNeeds Sequence::needs() const {
  if (state_ == nullptr || state_->observer == nullptr) return {};
  return FromProto(state_->observer->needs());
}

absl::Status Sequence::Observe(const ObservedRows& rows) {
  absl::StatusOr<Hold> hold = Take("Sequence::Observe", core_, state_);
  if (!hold.ok()) return hold.status();
  if (state_->observer == nullptr) return absl::OkStatus();
  return state_->observer->See(rows, kernels::OperationsOf(kernels::BestImplementation()));
}

absl::Status Sequence::ObserveTokens(std::uint64_t first_token,
                                     std::span<const std::uint32_t> ids) {
  absl::StatusOr<Hold> hold = Take("Sequence::ObserveTokens", core_, state_);
  if (!hold.ok()) return hold.status();
  if (state_->observer == nullptr) return absl::OkStatus();
  return state_->observer->ObserveTokenIds(first_token, ids);
}

absl::StatusOr<CompressResult> Sequence::Compress(const Packing& packing,
                                                  const RotationTensors& rotations) {
  absl::StatusOr<Hold> hold = TakeWithoutAbandonedRows("Sequence::Compress", core_, state_);
  if (!hold.ok()) return hold.status();
  const absl::StatusOr<v1::CompressResponse> response =
      CompressByRpc(*hold->session, *state_->model, state_->id, packing, rotations);
  if (!response.ok()) return response.status();
  return FromProto(*response);
}

absl::StatusOr<CompressResult> Sequence::Compress() {
  absl::StatusOr<Hold> hold = TakeWithoutAbandonedRows("Sequence::Compress", core_, state_);
  if (!hold.ok()) return hold.status();
  const absl::StatusOr<v1::CompressResponse> response =
      CompressByPolicy(*hold->session, *state_, 0, 0);
  if (!response.ok()) return response.status();
  Warn(*core_, *state_);
  return FromProto(*response);
}

absl::Status Sequence::EndPrompt() {
  absl::StatusOr<Hold> hold = TakeWithoutAbandonedRows("Sequence::EndPrompt", core_, state_);
  if (!hold.ok()) return hold.status();
  const absl::Status status =
      CompressByPolicy(*hold->session, *state_, 0, 0, CompressMode::kMarkEnd).status();
  if (status.ok() && state_->has_policy()) {
    const std::uint32_t layers = state_->model->layers();
    // A policy that acts while decoding begins when its budget is full: no look at its effect.
    const bool acts_later = needs().acts_while_decoding;
    state_->prompt_end.MarkEnded(0, layers, state_->tokens, layers, /*compressed=*/acts_later);
  }
  return status;
}

absl::StatusOr<Sequence> Sequence::Fork() { return ForkWith(nullptr); }

absl::StatusOr<Sequence> Sequence::Fork(const std::string& policy) { return ForkWith(&policy); }

absl::StatusOr<Sequence> Sequence::ForkWith(const std::string* policy) {
  absl::StatusOr<Hold> hold = TakeWithoutAbandonedRows("Sequence::Fork", core_, state_);
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
  // Observations that the parent has not sent yet apply to the child's tokens, too.
  if (state_->observer != nullptr && child->observer != nullptr &&
      state_->observer->CollectsSame(response.needs())) {
    child->observer = std::make_unique<Observer>(*state_->observer);
  }
  if (policy == nullptr) child->compressed_at = state_->compressed_at;
  child->prompt_waits = state_->prompt_waits;
  core_->AddSequence(child);
  return Sequence(core_, std::move(child));
}

absl::StatusOr<PublishedPrefix> Sequence::Publish(std::span<const std::uint32_t> token_ids,
                                                  const PublishOptions& options) {
  absl::StatusOr<Hold> hold = TakeWithoutAbandonedRows("Sequence::Publish", core_, state_);
  if (!hold.ok()) return hold.status();
  if (state_->observer != nullptr) {
    // Observations must be sent first, and token_ids has the ids of all tokens held.
    const auto held = token_ids.first(std::min<std::size_t>(token_ids.size(), state_->tokens));
    absl::Status status = state_->observer->ObserveTokenIds(0, held);
    if (!status.ok()) return status;
    // Workers that fork the prefix do not have this worker's observations.
    status = CompressByPolicy(*hold->session, *state_, 0, 0, CompressMode::kToAnother).status();
    if (!status.ok()) return status;
    Warn(*core_, *state_);
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
  absl::StatusOr<Hold> hold = Take("Sequence::Truncate", core_, state_);
  if (!hold.ok()) return hold.status();
  // Rows of an abandoned step do not belong to the sequence.
  if (tokens > state_->tokens) {
    if (absl::Status cut = CutAbandonedRows(*hold->session, *state_); !cut.ok()) return cut;
  }
  absl::Status status = TruncateTo(*hold->session, state_->id, tokens);
  if (!status.ok()) return status;
  state_->tail = Tail();
  state_->abandoned_rows = false;
  if (state_->observer != nullptr) state_->observer->TruncateTo(tokens);
  state_->SetTokens(tokens);
  state_->compressed_at = std::min(state_->compressed_at, tokens);
  if (tokens == 0) state_->prompt_waits = false;
  if (tokens == 0) state_->position_shift = 0;
  return absl::OkStatus();
}

absl::Status Sequence::Park() {
  absl::StatusOr<Hold> hold = Take("Sequence::Park", core_, state_);
  if (!hold.ok()) return hold.status();
  if (state_->tail.session != hold->session->serial()) return absl::OkStatus();
  const SequenceId ids[] = {state_->id};
  absl::StatusOr<v1::TailsClosed> closed = hold->session->CloseTails(ids);
  if (!closed.ok()) return closed.status();
  state_->tail = Tail();
  return absl::OkStatus();
}

absl::StatusOr<std::uint64_t> Sequence::Offload() {
  absl::StatusOr<Hold> hold = Take("Sequence::Offload", core_, state_);
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
  absl::StatusOr<Hold> hold = Take("Sequence::Restore", core_, state_);
  if (!hold.ok()) return hold.status();
  v1::RestoreRequest request;
  v1::RestoreResponse response;
  request.set_sequence_id(state_->id.value());
  return hold->session->Call(request, response);
}

absl::StatusOr<v1::DescribeResponse> DescribeMessage(const Sequence& sequence, Detail detail) {
  const std::shared_ptr<SequenceState>& state = SequenceAccess::State(sequence);
  if (state == nullptr) return EmptyHandle("Sequence::Describe");
  // Allowed at any time, because it touches nothing that a step uses. Rows that an abandoned step
  // left in the daemon are removed first.
  absl::StatusOr<std::shared_ptr<Session>> session = SequenceAccess::CoreOf(sequence)->session();
  if (!session.ok()) return session.status();
  if (state->gone) return SequenceUse::Take(state).status();
  if (absl::Status cut = CutBeforeReading(**session, state); !cut.ok()) return cut;
  v1::DescribeRequest request;
  v1::DescribeResponse response;
  request.set_sequence_id(state->id.value());
  request.set_lanes(detail == Detail::kLanes);
  request.set_entries(detail == Detail::kEntries);
  if (absl::Status status = (*session)->Call(request, response); !status.ok()) return status;
  return response;
}

absl::StatusOr<SequenceDescription> Sequence::Describe(bool lanes) const {
  const auto response = DescribeMessage(*this, lanes ? Detail::kLanes : Detail::kSequence);
  if (!response.ok()) return response.status();
  return FromProto(*response);
}

absl::StatusOr<SequenceDescription> Sequence::DescribeEntries() const {
  const auto response = DescribeMessage(*this, Detail::kEntries);
  if (!response.ok()) return response.status();
  return FromProto(*response);
}

absl::Status Sequence::Handover(SessionId to) {
  absl::StatusOr<Hold> hold = TakeWithoutAbandonedRows("Sequence::Handover", core_, state_);
  if (!hold.ok()) return hold.status();
  if (absl::Status sent = SendObservations(*hold->session, *state_); !sent.ok()) return sent;
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
  if (state_ == nullptr) return EmptyHandle("Sequence::Free");
  if (state_->ended || state_->gone) return absl::OkStatus();
  absl::StatusOr<Hold> hold = Take("Sequence::Free", core_, state_);
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
