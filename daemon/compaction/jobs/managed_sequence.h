// What compaction keeps with a sequence: its policy, and what it has learnt of each lane.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "daemon/base/check.h"
#include "daemon/base/mutex.h"
#include "daemon/cache/sequence/sequence.h"
#include "daemon/compaction/jobs/prompt_spans.h"
#include "daemon/compaction/lanes/lane_coder.h"
#include "daemon/compaction/lanes/lane_state.h"
#include "daemon/compaction/lanes/seal_requests.h"
#include "daemon/compaction/lanes/token_selector.h"
#include "daemon/compaction/lanes/uncommitted_step.h"
#include "daemon/policies/policy.h"

namespace tessera::compaction {

// Who works on a lane and what waits to be done there, under whatever policy: those that a sequence
// has one after another share it.
struct LaneWork {
  Mutex mutex;  // held by the job that works on the lane
  SealRequests seals;
  // Whether one that could not be carried out is in the line for memory (DeferredSeals). Where it
  // is not, the lane's next rows bring it back.
  std::atomic<bool> seal_in_line{false};
  // Tiles that found another job at work here: it has them encoded when it is done.
  std::atomic<bool> tiles_left{false};
};

class ManagedSequence final : public cache::Companion {
 public:
  struct ManagedLane {
    std::shared_ptr<LaneWork> work = std::make_shared<LaneWork>();
    LaneState state TESSERA_GUARDED_BY(work->mutex);
    DenseRecord left_dense;  // by the last seal
  };

  // Under a policy that chooses nothing it is known where chunks of text have ended, and no more.
  struct ManagedLayer {
    Mutex mutex;  // held by the job that chooses; before those of its lanes
    LayerState state TESSERA_GUARDED_BY(mutex);
    // One that has been carried out in some lanes when memory ran out: the others come first, so
    // that the lanes of a layer stay alike.
    std::optional<LayerChoice> unfinished TESSERA_GUARDED_BY(mutex);
    // There is one. Until it is finished the layer's rows keep their form, so that it still fits.
    std::atomic<bool> interrupted{false};
    DenseRecord left_dense;  // by the last choice: all lanes of the layer
    // Jobs that wait, or run, to choose for this layer.
    std::atomic<std::uint32_t> pending{0};
  };

  ManagedSequence(policies::Policy policy, const cache::Model& model)
      : policy_(std::move(policy)), lanes_(model.lanes()), layers_(model.layers()) {}
  // While it is held nothing is chosen in any layer, and nothing that was chosen is carried out in
  // some lanes of a layer, and in others not yet; nobody else pauses it, to set a policy, say.
  class Pause {
   public:
    explicit Pause(ManagedSequence& sequence) TESSERA_NO_THREAD_SAFETY_ANALYSIS
        : sequence_(sequence) {
      sequence.paused_.Lock();
      // In this order: whoever chooses for a layer asks those before it.
      for (std::size_t i = sequence.layers_.size(); i-- > 0;) sequence.layers_[i].mutex.Lock();
    }
    ~Pause() TESSERA_NO_THREAD_SAFETY_ANALYSIS {
      for (ManagedLayer& layer : sequence_.layers_) layer.mutex.Unlock();
      sequence_.paused_.Unlock();
    }
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

   private:
    ManagedSequence& sequence_;
  };

  // While it is held nobody works on any lane; after the pause.
  class LanesHeld {
   public:
    explicit LanesHeld(ManagedSequence& sequence) TESSERA_NO_THREAD_SAFETY_ANALYSIS
        : sequence_(sequence) {
      for (ManagedLane& lane : sequence.lanes_) lane.work->mutex.Lock();
    }
    ~LanesHeld() TESSERA_NO_THREAD_SAFETY_ANALYSIS {
      for (ManagedLane& lane : sequence_.lanes_) lane.work->mutex.Unlock();
    }
    LanesHeld(const LanesHeld&) = delete;
    LanesHeld& operator=(const LanesHeld&) = delete;

   private:
    ManagedSequence& sequence_;
  };

  // What a fork of a paused sequence goes on from, which has the first `tokens` of its tokens; what
  // a worker has shown, and nothing has been decided by, goes with it.
  ManagedSequence(ManagedSequence& parent, const Pause&, cache::Sequence& fork,
                  std::uint64_t tokens) TESSERA_NO_THREAD_SAFETY_ANALYSIS
      : ManagedSequence(parent.policy_, fork.model()) {
    if (parent.SplitsDecision(tokens)) fork.set_has_manual_changes();
    TakeLeftDenseOf(parent);
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      layers_[i].state.AdoptDecisions(parent.layers_[i].state);
      layers_[i].unfinished = parent.layers_[i].unfinished;
      layers_[i].interrupted = layers_[i].unfinished.has_value();
      layers_[i].state.observation = parent.layers_[i].state.observation;
      layers_[i].state.CutTo(tokens);
      if (layers_[i].unfinished.has_value()) layers_[i].unfinished->CutTo(tokens);
    }
    MutexLock lock(parent.text_mutex_);
    MutexLock own_lock(text_mutex_);
    text_ = parent.text_;
    prompts_ = parent.prompts_;
    CutTextTo(tokens);
    uncommitted_step_.Follow(parent.uncommitted_step_);
    uncommitted_step_.CutTo(tokens);
  }

  // A job waits for the rows.
  bool Busy() const override {
    return tiles_wanted_.load() ||
           std::any_of(lanes_.begin(), lanes_.end(),
                       [](const ManagedLane& lane) {
                         return lane.work->seals.wanted() || lane.work->tiles_left.load();
                       }) ||
           std::any_of(layers_.begin(), layers_.end(),
                       [](const ManagedLayer& layer) { return layer.pending.load() != 0; });
  }

  const policies::Policy& policy() const { return policy_; }
  const ManagedLane& lane(std::uint32_t index) const { return lanes_[index]; }
  const ManagedLayer& layer(std::uint32_t index) const { return layers_[index]; }
  ManagedLane& lane(std::uint32_t index) { return lanes_[index]; }
  ManagedLayer& layer(std::uint32_t index) { return layers_[index]; }

  // Whether a choice for the layer waits to be finished.
  bool Interrupted(std::uint32_t layer) const { return layers_[layer].interrupted; }

  // What the strategy before loses of the newest tiles of a lane; 0 where none wait for their own,
  // or none has come since a fork or another policy.
  kernels::Loss MonitoredLoss(std::uint32_t index) const TESSERA_NO_THREAD_SAFETY_ANALYSIS {
    return lanes_[index].state.MonitoredLoss();
  }
  // The tokens that every layer has chosen among.
  std::uint64_t decided_until() const TESSERA_NO_THREAD_SAFETY_ANALYSIS {
    std::uint64_t until = ~std::uint64_t{0};
    for (const ManagedLayer& layer : layers_) {
      until = std::min(until, layer.state.decided_until.load());
    }
    return until;
  }

  // Likewise of one layer.
  std::uint64_t decided_until(std::uint32_t layer) const TESSERA_NO_THREAD_SAFETY_ANALYSIS {
    return layers_[layer].state.decided_until.load();
  }

  // Whether something was chosen among more than the first `tokens`: what stays of those may be
  // less than the policy keeps.
  bool SplitsDecision(std::uint64_t tokens) const TESSERA_NO_THREAD_SAFETY_ANALYSIS {
    const auto parts = [tokens](const ManagedLayer& layer) {
      return layer.state.depends_until > tokens ||
             (layer.unfinished.has_value() && layer.unfinished->end > tokens);
    };
    return tokens > 0 && policy_.drops_entries() && std::ranges::any_of(layers_, parts);
  }

  std::vector<std::uint64_t> decided_by_layer() const TESSERA_NO_THREAD_SAFETY_ANALYSIS {
    std::vector<std::uint64_t> until;
    if (!policy_.chooses()) return until;
    for (const ManagedLayer& layer : layers_) until.push_back(layer.state.decided_until.load());
    return until;
  }

  void TakeTokenIds(std::uint64_t first_token, std::span<const std::uint32_t> ids,
                    const cache::Model& model) {
    MutexLock lock(text_mutex_);
    compaction::TakeTokenIds(first_token, ids, model, text_);
  }
  // It was cut to so many tokens.
  void CutTo(cache::Sequence& sequence, std::uint64_t tokens,
             const Pause&) TESSERA_NO_THREAD_SAFETY_ANALYSIS {
    if (SplitsDecision(tokens)) sequence.set_has_manual_changes();
    for (ManagedLane& lane : lanes_) {
      lane.work->seals.CutTo(tokens);
      lane.left_dense.CutTo(tokens);
    }
    for (ManagedLayer& layer : layers_) {
      layer.left_dense.CutTo(tokens);
      layer.state.CutTo(tokens);
      if (layer.unfinished.has_value()) layer.unfinished->CutTo(tokens);
    }
    uncommitted_step_.CutTo(tokens);
    MutexLock lock(text_mutex_);
    CutTextTo(tokens);
  }
  // All its lanes hold the other's entries now, and it has no others: what has been decided about
  // them is what was decided there, in all lanes. What was shown, or waits to be done, is its own.
  void AdoptDecisions(ManagedSequence& other, const Pause&,
                      const Pause& /*other*/) TESSERA_NO_THREAD_SAFETY_ANALYSIS {
    TESSERA_CHECK(policy_.text == other.policy_.text, "both have one policy");
    TakeLeftDenseOf(other);
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      const std::uint64_t before = layers_[i].state.decided_until;
      layers_[i].state.AdoptDecisions(other.layers_[i].state);
      if (layers_[i].state.decided_until > before) {
        layers_[i].state.observation.ForgetBefore(layers_[i].state.decided_until);
      }
      layers_[i].unfinished.reset();
      layers_[i].interrupted = false;
    }
  }
  // The same sequence under another policy, before anybody sees it: its text, where chunks of that
  // have ended, where its prompts are, and what waits to be done are what they were. So is what was
  // shown, if this one asks for the same; else it stays known that somebody has shown something.
  // One that learns from every query goes on from what another budget of the same system has
  // learned, of queries that nobody has any more. `before` is paused.
  void Follow(const ManagedSequence& before,
              cache::Sequence& sequence) TESSERA_NO_THREAD_SAFETY_ANALYSIS {
    const bool asks_alike = policies::NeedsOf(policy_) == policies::NeedsOf(before.policy_);
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      const ManagedLayer& layer = before.layers_[i];
      if (policy_.chooses()) {
        Observation& shown = layers_[i].state.observation;
        shown = layer.state.observation;
        if (!asks_alike) shown.ForgetRows();
      }
      layers_[i].state.memory.boundaries = layer.unfinished.has_value()
                                               ? layer.unfinished->BoundariesNow(layer.state.memory)
                                               : layer.state.memory.boundaries;
      if (!policies::LearnsTheSame(policy_, before.policy_) || layer.unfinished.has_value())
        continue;
      layers_[i].state.AdoptDecisions(layer.state);
      // By this budget others would have gone, and at other times.
      if (layer.state.decided_until > 0) sequence.set_has_manual_changes();
    }
    for (std::size_t i = 0; i < lanes_.size(); ++i) lanes_[i].work = before.lanes_[i].work;
    std::vector<policies::TextMark> text = before.text();
    std::vector<policies::TokenSpan> prompts = before.prompts();
    uncommitted_step_.Follow(before.uncommitted_step_);
    MutexLock lock(text_mutex_);
    text_ = std::move(text);
    for (const policies::TokenSpan& prompt : prompts) prompts_.Add(prompt.begin, prompt.end);
  }
  // Whether it is known that chunks of text have ended. Nobody else has it.
  bool KnowsChunks() const TESSERA_NO_THREAD_SAFETY_ANALYSIS {
    return std::ranges::any_of(layers_, [](const ManagedLayer& layer) {
      return std::ranges::any_of(layer.state.memory.boundaries,
                                 [](const auto& of_lane) { return !of_lane.empty(); });
    });
  }
  // By token, as far as ids were shown.
  std::vector<policies::TextMark> text() const {
    MutexLock lock(text_mutex_);
    return text_;
  }

  // Tokens [begin, end) came as a prompt, or a part of one.
  void TakePrompt(std::uint64_t begin, std::uint64_t end) {
    uncommitted_step_.Prompt(end);
    MutexLock lock(text_mutex_);
    prompts_.Add(begin, end);
  }
  // What there is of a sequence that nobody has managed: of what its steps brought nobody knows.
  void TakeAsPrompt(std::uint64_t tokens, std::uint64_t step_begin) {
    TakePrompt(0, tokens);
    if (step_begin < tokens) TakeStep(step_begin, tokens);
  }
  std::vector<policies::TokenSpan> prompts() const {
    MutexLock lock(text_mutex_);
    return prompts_.spans();
  }
  // Tokens [begin, end) were decoded, by a step that may not have ended.
  void TakeStep(std::uint64_t begin, std::uint64_t end) { uncommitted_step_.Begin(begin, end); }
  const UncommittedStep& open_step() const { return uncommitted_step_; }

  // Tokens before this one a choice may still come for; those behind stay, if no prompt comes.
  std::uint64_t chosen_before(std::uint32_t layer) const TESSERA_NO_THREAD_SAFETY_ANALYSIS {
    if (!policy_.chooses()) return 0;
    if (policies::Continues(policy_)) return ~std::uint64_t{0};
    MutexLock lock(text_mutex_);
    const std::uint64_t prompts = prompts_.spans().empty() ? 0 : prompts_.spans().back().end;
    return prompts <= layers_[layer].state.considered_until ? 0 : prompts;
  }

  // True for the first that asks since the job began.
  bool WantTiles() { return !tiles_wanted_.exchange(true); }
  void TilesBegin() { tiles_wanted_.store(false); }

  // Null where the sequence has no policy that does anything.
  static std::shared_ptr<ManagedSequence> Of(const cache::Sequence& sequence) {
    return std::static_pointer_cast<ManagedSequence>(sequence.companion());
  }

 private:
  void TakeLeftDenseOf(const ManagedSequence& other) {
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
      lanes_[i].left_dense.Set(other.lanes_[i].left_dense.Get());
    }
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      layers_[i].left_dense.Set(other.layers_[i].left_dense.Get());
    }
  }
  void CutTextTo(std::uint64_t tokens) TESSERA_REQUIRES(text_mutex_) {
    if (text_.size() > tokens) text_.resize(tokens);
    prompts_.CutTo(tokens);
  }

  const policies::Policy policy_;
  Mutex paused_;
  std::atomic<bool> tiles_wanted_{false};
  std::vector<ManagedLane> lanes_;
  std::vector<ManagedLayer> layers_;
  mutable Mutex text_mutex_;
  std::vector<policies::TextMark> text_ TESSERA_GUARDED_BY(text_mutex_);
  PromptSpans prompts_ TESSERA_GUARDED_BY(text_mutex_);
  UncommittedStep uncommitted_step_;
};

}  // namespace tessera::compaction
