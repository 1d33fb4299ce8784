// Worker calls for published prefixes.

#include <algorithm>
#include <utility>

#include "client/api/lease_core.h"
#include "client/error/error_info.h"
#include "client/sequence/sequence_state.h"
#include "client/session/session.h"
#include "tessera/worker.h"

namespace tessera::client {

absl::StatusOr<PrefixMatch> Worker::Match(const Model& model, const MatchOptions& options) {
  if (!model.valid()) {
    return BadArgument("Worker::Match",
                       "model is an empty handle; RegisterModel returns a valid one");
  }
  absl::StatusOr<std::shared_ptr<Session>> session = core_->session();
  if (!session.ok()) return session.status();
  v1::MatchRequest request;
  v1::MatchResponse response;
  request.set_model_id(model.record_->bound()->id().value());
  request.set_policy(options.policy);
  request.mutable_token_ids()->Add(options.tokens.begin(), options.tokens.end());
  const std::chrono::milliseconds wait = std::max(options.wait, std::chrono::milliseconds(0));
  request.set_wait_ms(static_cast<std::uint64_t>(wait.count()));
  request.set_will_compute(options.will_compute);
  if (absl::Status status = (*session)->Call(request, response, wait); !status.ok()) return status;
  return PrefixMatch{.model = model,
                     .prefix = PrefixId(response.prefix_id()),
                     .tokens = response.tokens(),
                     .computing = response.computing_tokens(),
                     .computation = ComputationId(response.computation_id())};
}

absl::StatusOr<Sequence> Worker::Fork(const PrefixMatch& match, std::uint64_t tokens) {
  if (!match.found()) {
    return BadArgument("Worker::Fork", "the match found no prefix; create a sequence instead");
  }
  if (!match.model.valid()) {
    return BadArgument("Worker::Fork", "match.model is an empty handle; use the match as returned");
  }
  absl::StatusOr<std::shared_ptr<Session>> session = core_->session();
  if (!session.ok()) return session.status();
  v1::ForkRequest request;
  v1::ForkResponse response;
  request.set_parent_id(match.prefix.value());
  request.set_tokens(tokens == 0 ? match.tokens : tokens);
  if (absl::Status status = (*session)->Call(request, response); !status.ok()) return status;
  auto state = std::make_shared<SequenceState>(SequenceId(response.sequence_id()),
                                               match.model.record_->bound(),
                                               response.directory_offset(), response.tokens());
  state->TakePolicy(response);
  state->position_shift = response.position_shift();
  state->compressed_at = response.tokens();
  if (state->observer != nullptr) state->observer->MarkPrefixDecided();
  core_->AddSequence(state);
  return Sequence(core_, std::move(state));
}

absl::Status Worker::Free(PrefixId prefix) { return FreeId(prefix.value()); }

absl::Status Worker::Withdraw(ComputationId computation) { return FreeId(computation.value()); }

absl::Status Worker::FreeId(std::uint64_t id) {
  absl::StatusOr<std::shared_ptr<Session>> session = core_->session();
  if (!session.ok()) return session.status();
  v1::FreeRequest request;
  v1::FreeResponse response;
  request.add_sequence_ids(id);
  return (*session)->Call(request, response);
}

}  // namespace tessera::client
