// The state that compaction attaches to a sequence: its policy and the state of its layers and
// lanes.
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
#include "daemon/compaction/jobs/managed_lanes.h"
#include "daemon/compaction/jobs/prompt_spans.h"
#include "daemon/compaction/lanes/lane_coder.h"
#include "daemon/compaction/lanes/token_selector.h"
#include "daemon/compaction/lanes/uncommitted_step.h"
#include "daemon/policies/policy.h"

namespace tessera::compaction {

// A sequence's compaction state under one policy. Owned by the sequence as its companion, and
// replaced when another policy is set; a dense sequence without known chunk boundaries has none.
// Any thread may use it. Lock order: Pause, layers from last to first, lanes, text.
class ManagedSequence final : public cache::Companion {
 public:
  // If the policy chooses nothing, only the boundaries of text chunks are kept.
  struct ManagedLayer {
    Mutex mutex;  // held by the job that chooses; locked before the lanes' mutexes
    LayerState state TESSERA_GUARDED_BY(mutex);
    // A choice that was carried out in some lanes when memory ran out. It is finished before
    // anything else is chosen, so that the lanes of a layer stay alike.
    std::optional<LayerChoice> unfinished TESSERA_GUARDED_BY(mutex);
    // Mirrors `unfinished`. While set, the layer's rows keep their form, so that the choice fits.
    std::atomic<bool> interrupted{false};
    DenseRecord left_dense;  // what the last choice left dense, in all lanes
    // Number of queued and running jobs that choose for this layer.
    std::atomic<std::uint32_t> pending{0};
  };

  // RESOURCE_EXHAUSTED: the tenant or the node has no room for it.
  static absl::StatusOr<std::shared_ptr<ManagedSequence>> Create(policies::Policy policy,
                                                                 const cache::Model& model,
                                                                 pool::Account* heap) {
    absl::StatusOr<pool::Charge> charge = heap->Reserve(
        pool::MemoryTag::kState, sizeof(ManagedSequence) + model.layers() * sizeof(ManagedLayer));
    if (!charge.ok()) return charge.status();
    return std::shared_ptr<ManagedSequence>(
        new ManagedSequence(std::move(policy), model, heap, *std::move(charge)));
  }
  absl::Status MakeLanes() override { return lanes_.Make(); }

  // While held, no layer is being decided about, and no choice is partly carried out by a running
  // job. Exclusive: policy changes, forks and truncations hold it, too.
  class Pause {
   public:
    explicit Pause(ManagedSequence& sequence) TESSERA_NO_THREAD_SAFETY_ANALYSIS
        : sequence_(sequence) {
      sequence.paused_.Lock();
      // From last to first: a job that holds a layer may lock the layers before it.
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

  // While held, no job works on any lane. Lock after Pause. Makes the lanes: a job may work on them
  // as soon as there are rows.
  class LanesHeld {
   public:
    explicit LanesHeld(ManagedSequence& sequence) TESSERA_NO_THREAD_SAFETY_ANALYSIS
        : sequence_(sequence) {
      for (std::uint32_t i = 0; i < sequence.lane_count_; ++i) sequence.lane(i).work->mutex.Lock();
    }
    ~LanesHeld() TESSERA_NO_THREAD_SAFETY_ANALYSIS {
      for (ManagedLane& lane : sequence_.lanes_.all()) lane.work->mutex.Unlock();
    }
    LanesHeld(const LanesHeld&) = delete;
    LanesHeld& operator=(const LanesHeld&) = delete;

   private:
    ManagedSequence& sequence_;
  };

  // Creates the state of a fork, to be filled by Inherit. Call it before forking: it can fail.
  absl::StatusOr<std::shared_ptr<ManagedSequence>> CreateForFork(const cache::Model& model) {
    absl::StatusOr<std::shared_ptr<ManagedSequence>> fork = Create(policy_, model, heap_);
    if (!fork.ok() || lanes_.all().empty()) return fork;
    if (absl::Status status = (*fork)->MakeLanes(); !status.ok()) return status;
    return fork;
  }
  // Takes over the state of a paused sequence, of which `fork` has the first `tokens` tokens,
  // before this object becomes visible. Observations that no decision has used yet are copied.
  void Inherit(ManagedSequence& parent, const Pause&, cache::Sequence& fork,
               std::uint64_t tokens) TESSERA_NO_THREAD_SAFETY_ANALYSIS {
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

  // Whether jobs are queued or running for the sequence.
  bool Busy() const override {
    return tiles_wanted_.load() ||
           std::ranges::any_of(lanes_.all(),
                               [](const ManagedLane& lane) {
                                 return lane.work->seals.wanted() || lane.work->tiles_left.load();
                               }) ||
           std::any_of(layers_.begin(), layers_.end(),
                       [](const ManagedLayer& layer) { return layer.pending.load() != 0; });
  }

  const policies::Policy& policy() const { return policy_; }
  // Null while the sequence has no rows.
  const ManagedLane* FindLane(std::uint32_t index) const { return lanes_.Find(index); }
  const ManagedLayer& layer(std::uint32_t index) const { return layers_[index]; }
  ManagedLane& lane(std::uint32_t index) { return lanes_.at(index); }
  ManagedLayer& layer(std::uint32_t index) { return layers_[index]; }

  // Whether the layer has a choice that must be finished.
  bool Interrupted(std::uint32_t layer) const { return layers_[layer].interrupted; }

  // The loss of a lane's newest tiles under the previous segment's strategy; 0 if no tiles wait for
  // their own strategy, or none was added since a fork or a policy change.
  kernels::Loss MonitoredLoss(std::uint32_t index) const TESSERA_NO_THREAD_SAFETY_ANALYSIS {
    const ManagedLane* const lane = FindLane(index);
    return lane == nullptr ? kernels::Loss() : lane->state.MonitoredLoss();
  }
  // The tokens that every layer has decided about.
  std::uint64_t decided_until() const TESSERA_NO_THREAD_SAFETY_ANALYSIS {
    std::uint64_t until = ~std::uint64_t{0};
    for (const ManagedLayer& layer : layers_) {
      until = std::min(until, layer.state.decided_until.load());
    }
    return until;
  }

  // The same for one layer.
  std::uint64_t decided_until(std::uint32_t layer) const TESSERA_NO_THREAD_SAFETY_ANALYSIS {
    return layers_[layer].state.decided_until.load();
  }

  // Whether a decision covers more than the first `tokens`. What is kept of these may then be less
  // than the policy would keep.
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
  // The sequence was truncated to `tokens`.
  void CutTo(cache::Sequence& sequence, std::uint64_t tokens,
             const Pause&) TESSERA_NO_THREAD_SAFETY_ANALYSIS {
    if (SplitsDecision(tokens)) sequence.set_has_manual_changes();
    for (ManagedLane& lane : lanes_.all()) {
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
  // Called when all lanes hold exactly the other sequence's entries: copies the decisions about
  // them. Observations and pending work are not copied.
  void AdoptDecisions(ManagedSequence& other, const Pause&,
                      const Pause& /*other*/) TESSERA_NO_THREAD_SAFETY_ANALYSIS {
    TESSERA_CHECK(policy_.text == other.policy_.text, "both sequences must have the same policy");
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
  // Takes over the state of the same sequence under its previous policy, which is paused, before
  // this object becomes visible: text, chunk boundaries, prompts and pending work. Observations are
  // kept if both policies need the same; otherwise only the fact that something was observed. A
  // policy that learns from every query continues from what the same system with another budget has
  // learned, because those queries are no longer available.
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
      // This budget would have dropped other entries, at other times.
      if (layer.state.decided_until > 0) sequence.set_has_manual_changes();
    }
    // The lanes of `before` are held, so they exist.
    const std::span<ManagedLane> theirs = before.lanes_.all();
    for (std::uint32_t i = 0; i < theirs.size(); ++i) lane(i).work = theirs[i].work;
    std::vector<policies::TextMark> text = before.text();
    std::vector<policies::TokenSpan> prompts = before.prompts();
    uncommitted_step_.Follow(before.uncommitted_step_);
    MutexLock lock(text_mutex_);
    text_ = std::move(text);
    for (const policies::TokenSpan& prompt : prompts) prompts_.Add(prompt.begin, prompt.end);
  }
  // Whether any chunk boundaries are known. Call it while no other thread has this object.
  bool KnowsChunks() const TESSERA_NO_THREAD_SAFETY_ANALYSIS {
    return std::ranges::any_of(layers_, [](const ManagedLayer& layer) {
      return std::ranges::any_of(layer.state.memory.boundaries,
                                 [](const auto& of_lane) { return !of_lane.empty(); });
    });
  }
  // By token, as far as ids were observed.
  std::vector<policies::TextMark> text() const {
    MutexLock lock(text_mutex_);
    return text_;
  }

  // Tokens [begin, end) arrived as a prompt, or as a part of one.
  void TakePrompt(std::uint64_t begin, std::uint64_t end) {
    uncommitted_step_.Prompt(end);
    MutexLock lock(text_mutex_);
    prompts_.Add(begin, end);
  }
  // Records the tokens of a sequence that had no policy before as one prompt, because it is unknown
  // which of them were decoded.
  void TakeAsPrompt(std::uint64_t tokens, std::uint64_t step_begin) {
    TakePrompt(0, tokens);
    if (step_begin < tokens) TakeStep(step_begin, tokens);
  }
  std::vector<policies::TokenSpan> prompts() const {
    MutexLock lock(text_mutex_);
    return prompts_.spans();
  }
  // Tokens [begin, end) were decoded by a step that may not have ended.
  void TakeStep(std::uint64_t begin, std::uint64_t end) { uncommitted_step_.Begin(begin, end); }
  const UncommittedStep& open_step() const { return uncommitted_step_; }

  // The end of the tokens that a choice may still change. Later tokens are kept unless another
  // prompt follows.
  std::uint64_t chosen_before(std::uint32_t layer) const TESSERA_NO_THREAD_SAFETY_ANALYSIS {
    if (!policy_.chooses()) return 0;
    if (policies::Continues(policy_)) return ~std::uint64_t{0};
    MutexLock lock(text_mutex_);
    const std::uint64_t prompts = prompts_.spans().empty() ? 0 : prompts_.spans().back().end;
    return prompts <= layers_[layer].state.considered_until ? 0 : prompts;
  }

  // Rows from this token on keep their form until a choice has scored them.
  std::uint64_t encodable_before(std::uint32_t layer) const TESSERA_NO_THREAD_SAFETY_ANALYSIS {
    if (HasStops(policy_)) return layers_[layer].state.decided_until;
    if (!ChoosesByPrompt(policy_)) return ~std::uint64_t{0};
    const std::uint64_t considered = layers_[layer].state.considered_until;
    MutexLock lock(text_mutex_);
    for (const policies::TokenSpan& prompt : prompts_.spans()) {
      if (prompt.end > considered) return std::max(prompt.begin, considered);
    }
    return ~std::uint64_t{0};
  }
  // The same for the job that is about to choose.
  std::uint64_t next_stop(std::uint32_t layer) const TESSERA_NO_THREAD_SAFETY_ANALYSIS {
    if (!HasStops(policy_)) return encodable_before(layer);
    const std::uint64_t decided = layers_[layer].state.decided_until;
    MutexLock lock(text_mutex_);
    return StopAfter(prompts_.spans(), decided);
  }

  // True for the first call since the job began.
  bool WantTiles() { return !tiles_wanted_.exchange(true); }
  void TilesBegin() { tiles_wanted_.store(false); }

  // Null: the sequence is dense and has no known chunk boundaries.
  static std::shared_ptr<ManagedSequence> Of(const cache::Sequence& sequence) {
    return std::static_pointer_cast<ManagedSequence>(sequence.companion());
  }

 private:
  void TakeLeftDenseOf(const ManagedSequence& other) {
    const std::span<ManagedLane> theirs = other.lanes_.all();
    for (std::uint32_t i = 0; i < theirs.size(); ++i) {
      lane(i).left_dense.Set(theirs[i].left_dense.Get());
    }
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      layers_[i].left_dense.Set(other.layers_[i].left_dense.Get());
    }
  }
  void CutTextTo(std::uint64_t tokens) TESSERA_REQUIRES(text_mutex_) {
    if (text_.size() > tokens) text_.resize(tokens);
    prompts_.CutTo(tokens);
  }

  ManagedSequence(policies::Policy policy, const cache::Model& model, pool::Account* heap,
                  pool::Charge charge)
      : policy_(std::move(policy)),
        heap_(heap),
        charge_(std::move(charge)),
        lane_count_(model.lanes()),
        lanes_(heap, model.lanes()),
        layers_(model.layers()) {}

  const policies::Policy policy_;
  pool::Account* const heap_;
  const pool::Charge charge_;  // of this object and its layers
  Mutex paused_;
  std::atomic<bool> tiles_wanted_{false};
  const std::uint32_t lane_count_;
  ManagedLanes lanes_;
  std::vector<ManagedLayer> layers_;
  mutable Mutex text_mutex_;
  std::vector<policies::TextMark> text_ TESSERA_GUARDED_BY(text_mutex_);
  PromptSpans prompts_ TESSERA_GUARDED_BY(text_mutex_);
  UncommittedStep uncommitted_step_;
};

}  // namespace tessera::compaction
