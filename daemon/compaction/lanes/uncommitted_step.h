// Tokens that a worker has decoded through gRPC, and may still take back: a step appends all of its
// drafts, and cuts off those that were not accepted when it ends. That it has ended is known when
// something comes behind it.
//
// Through mapped memory nobody sees a token before its step has ended.
#pragma once

#include <algorithm>
#include <cstdint>

#include "daemon/base/mutex.h"
#include "daemon/policies/token_policy.h"
#include "kernels/format/dense_tile.h"

namespace tessera::compaction {

class OpenStep {
 public:
  OpenStep() = default;
  OpenStep(const OpenStep&) = delete;
  OpenStep& operator=(const OpenStep&) = delete;

  // A step brings [begin, end), layer by layer: those before it stay.
  void Begin(std::uint64_t begin, std::uint64_t end) {
    MutexLock lock(mutex_);
    if (begin != state_.span.begin) state_.ended_before = state_.span.begin;
    state_.span = {.begin = begin, .end = end};
  }
  // A prompt comes, up to this token: it is taken as it is.
  void Prompt(std::uint64_t end) {
    MutexLock lock(mutex_);
    state_ = {.span = {.begin = end, .end = end}, .ended_before = end};
  }
  // The sequence was cut to so many tokens: by the step, or to begin anew from there.
  void CutTo(std::uint64_t tokens) {
    MutexLock lock(mutex_);
    state_.span.begin = std::min(state_.span.begin, tokens);
    state_.span.end = std::min(state_.span.end, tokens);
    state_.ended_before = std::min(state_.ended_before, tokens);
  }
  // What is known of another sequence that begins alike.
  void Follow(const OpenStep& other) {
    State theirs;
    {
      MutexLock lock(other.mutex_);
      theirs = other.state_;
    }
    MutexLock lock(mutex_);
    state_ = theirs;
  }

  // Of a layer that holds tokens up to `end`: those before this one stay. To be asked when it has
  // been looked at; what is behind the step says that it has ended.
  std::uint64_t FinalBefore(std::uint64_t end) const {
    MutexLock lock(mutex_);
    return end > state_.span.end ? end : std::min(state_.span.begin, end);
  }
  // Whether the step before has filled a tile: whoever counts what stays has something to count.
  bool FilledTile() const {
    MutexLock lock(mutex_);
    return state_.ended_before / kernels::kTileEntries != state_.span.begin / kernels::kTileEntries;
  }

 private:
  struct State {
    policies::TokenSpan span;        // of the newest step
    std::uint64_t ended_before = 0;  // the first token of the step before it
  };
  mutable Mutex mutex_;
  State state_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::compaction
