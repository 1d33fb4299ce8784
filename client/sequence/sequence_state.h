// The client's state of one sequence. Only the thread that holds its SequenceUse may access it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "client/error/error_info.h"
#include "client/mapped/tails.h"
#include "client/observe/observer.h"
#include "client/sequence/prompt_end.h"
#include "client/session/bound_model.h"
#include "daemon/base/strings.h"
#include "kernels/dispatch/attend.h"
#include "kernels/format/lane_view.h"
#include "tessera/ids.h"
#include "tessera/v1/form.pb.h"

namespace tessera::client {

// Lanes as resolved at one version of the sequence's block. Valid while the block has that version
// and the reader holds a pin.
struct ResolvedLanes {
  std::uint64_t session = 0;  // serial of the session whose mapping the pointers refer to
  std::uint64_t version = 0;  // 0: nothing resolved
  std::vector<kernels::SegmentView> segments;
  std::vector<kernels::LaneView> lanes;
};

// The default selection rule of a sequence, for calls that name none.
struct PolicySelection {
  kernels::SelectionRule rule;
  std::uint32_t dense_layers = 0;  // the first layers, which read everything
};

PolicySelection FromProto(const v1::PolicySelection& policy);

struct SequenceState {
  SequenceState(SequenceId sequence, std::shared_ptr<const BoundModel> bound, std::uint64_t offset,
                std::uint64_t held)
      : id(sequence), model(std::move(bound)), directory_offset(offset), tokens(held) {}

  const SequenceId id;
  const std::shared_ptr<const BoundModel> model;
  const std::uint64_t directory_offset;
  std::optional<PolicySelection> selection;  // of its policy; constant once the state is shared
  std::string policy;                        // likewise
  std::atomic<bool> in_use{false};
  std::atomic<bool> gone{false};   // lost with the daemon or session that held it
  std::atomic<bool> ended{false};  // freed or handed over: the handle cannot be used

  // Everything below belongs to the holder of the Use.
  std::uint64_t tokens;  // held by every layer, as far as this client knows
  // Per layer, if layers were appended separately and hold different counts; else empty.
  std::vector<std::uint64_t> layer_tokens;
  // The daemon may still hold rows of an abandoned step that could not be removed. They are
  // truncated before the next use of the sequence.
  std::atomic<bool> abandoned_rows{false};  // other threads may read it
  bool uncertain = false;  // a call's outcome is unknown: ask the daemon before the next use
  Tail tail;
  ResolvedLanes resolved;
  std::unique_ptr<Observer> observer;  // null: the policy needs no observations
  std::uint64_t compressed_at = 0;     // tokens held when it was last compressed
  bool prompt_waits = false;           // rows were appended in bulk since then
  PromptEnd prompt_end;
  std::optional<std::string> warning;  // passed to the worker when the call is done
  std::uint64_t position_shift = 0;    // token t has the rotary position t - position_shift

  // Sets the policy of a new sequence from CreateSequenceResponse or ForkResponse.
  void TakePolicy(const auto& response) {
    policy = response.policy();
    if (response.has_selection()) selection = FromProto(response.selection());
    if (response.has_needs()) observer = std::make_unique<Observer>(response.needs(), model);
  }

  bool has_policy() const { return !policy.empty() && policy != "dense"; }
  std::uint64_t TokensOf(std::uint32_t layer) const {
    return layer_tokens.empty() ? tokens : layer_tokens[layer];
  }
  // Discards observations of later tokens, such as rejected drafts.
  void SetTokens(std::uint64_t held) {
    tokens = held;
    layer_tokens.clear();
    if (observer != nullptr) observer->TruncateRows(held);
  }
  // The same for layers that hold different counts, as the daemon reports them.
  void SetLayers(std::uint64_t held, std::vector<std::uint64_t> by_layer) {
    tokens = held;
    const bool alike = std::ranges::all_of(by_layer, [&](auto layer) { return layer == held; });
    if (alike) return SetTokens(held);
    layer_tokens = std::move(by_layer);
    for (std::uint32_t layer = 0; layer < layer_tokens.size() && observer != nullptr; ++layer) {
      observer->TruncateLayer(layer_tokens[layer], layer);
    }
  }
  void Grow(std::uint32_t first_layer, std::uint32_t layers, std::uint64_t count) {
    if (layers == model->layers() && layer_tokens.empty()) {
      tokens += count;
      return;
    }
    if (layer_tokens.empty()) layer_tokens.assign(model->layers(), tokens);
    for (std::uint32_t i = first_layer; i < first_layer + layers; ++i) layer_tokens[i] += count;
    const auto [least, most] = std::minmax_element(layer_tokens.begin(), layer_tokens.end());
    tokens = *least;
    if (*least == *most) layer_tokens.clear();
  }
};

// Proof that this thread has exclusive use of the sequence.
class SequenceUse {
 public:
  static absl::StatusOr<SequenceUse> Take(const std::shared_ptr<SequenceState>& state) {
    if (state->gone.load(std::memory_order_acquire)) {
      return absl::NotFoundError(
          Concat(state->id.ToString(), " is gone with the daemon or session that held it"));
    }
    if (state->ended.load(std::memory_order_acquire)) {
      return absl::NotFoundError(Concat(state->id.ToString(), " was freed or handed over"));
    }
    if (state->in_use.exchange(true, std::memory_order_acquire)) {
      return WithCause(
          absl::FailedPreconditionError(
              Concat(state->id.ToString(),
                     " is in use by a step or another call; use a sequence for ", "one at a time")),
          ErrorCause::kSequenceBusy);
    }
    return SequenceUse(state);
  }

  SequenceUse(SequenceUse&& other) noexcept = default;
  SequenceUse& operator=(SequenceUse&& other) noexcept {
    std::swap(state_, other.state_);
    return *this;
  }
  ~SequenceUse() {
    if (state_ != nullptr) state_->in_use.store(false, std::memory_order_release);
  }

  SequenceState& operator*() const { return *state_; }
  SequenceState* operator->() const { return state_.get(); }

 private:
  explicit SequenceUse(std::shared_ptr<SequenceState> state) : state_(std::move(state)) {}
  std::shared_ptr<SequenceState> state_;
};

}  // namespace tessera::client
