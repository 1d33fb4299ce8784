// Tracks decoded tokens that a worker on the RPC transport may still take back.
//
// A speculative step appends all of its drafts and truncates the rejected ones when it ends. The
// daemon knows that a step has ended when the worker appends the next tokens. On the mapped
// transport tokens become visible only when their step ends.
#pragma once

#include <algorithm>
#include <cstdint>

#include "daemon/base/mutex.h"
#include "daemon/policies/token_policy.h"
#include "kernels/format/dense_tile.h"

namespace tessera::compaction {

// Thread-safe.
class UncommittedStep {
 public:
  UncommittedStep() = default;
  UncommittedStep(const UncommittedStep&) = delete;
  UncommittedStep& operator=(const UncommittedStep&) = delete;

  // A step appends [begin, end), one call per layer. All tokens before `begin` are final.
  void Begin(std::uint64_t begin, std::uint64_t end) {
    MutexLock lock(mutex_);
    if (begin != state_.span.begin) state_.ended_before = state_.span.begin;
    state_.span = {.begin = begin, .end = end};
  }
  // A prompt is appended, up to this token. Its tokens are final.
  void Prompt(std::uint64_t end) {
    MutexLock lock(mutex_);
    state_ = {.span = {.begin = end, .end = end}, .ended_before = end};
  }
  // The sequence was truncated to `tokens`, by the step or for another reason.
  void CutTo(std::uint64_t tokens) {
    MutexLock lock(mutex_);
    state_.span.begin = std::min(state_.span.begin, tokens);
    state_.span.end = std::min(state_.span.end, tokens);
    state_.ended_before = std::min(state_.ended_before, tokens);
  }
  // Copies the state of another sequence with the same tokens.
  void Follow(const UncommittedStep& other) {
    State theirs;
    {
      MutexLock lock(other.mutex_);
      theirs = other.state_;
    }
    MutexLock lock(mutex_);
    state_ = theirs;
  }

  // The first token that may still be taken back, of a layer that holds tokens up to `end`. Call it
  // after reading the layer: tokens after the step prove that the step has ended.
  std::uint64_t FinalBefore(std::uint64_t end) const {
    MutexLock lock(mutex_);
    return end > state_.span.end ? end : std::min(state_.span.begin, end);
  }
  // Whether the previous, ended step has filled a tile with final tokens.
  bool PreviousStepFilledTile() const {
    MutexLock lock(mutex_);
    return state_.ended_before / kernels::kTileEntries != state_.span.begin / kernels::kTileEntries;
  }

 private:
  struct State {
    policies::TokenSpan span;        // tokens of the newest step
    std::uint64_t ended_before = 0;  // first token of the previous step
  };
  mutable Mutex mutex_;
  State state_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::compaction
