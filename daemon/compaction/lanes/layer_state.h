// What is kept of a layer beside its lanes: what was shown of it, and what has been decided by
// that.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "absl/status/status.h"
#include "daemon/compaction/observation/observation.h"
#include "daemon/policies/token_policy.h"

namespace tessera::compaction {

struct LayerState {
  policies::LayerMemory memory;
  // Tokens before it have been decided about. Others may look at any time.
  std::atomic<std::uint64_t> decided_until{0};
  // Those before it have been looked at; what was left of them waits for the next prompt's end, if
  // that comes soon.
  std::atomic<std::uint64_t> looked_until{0};
  // Why the last choice has left them all to the next one, where its policy had no budget for them.
  absl::Status refused;
  // What was decided about tokens before it hung on all of these: some have gone, or learned scores
  // are of queries up to there.
  std::uint64_t chosen_until = 0;
  Observation observation;

  // The sequence was cut to so many tokens.
  void CutTo(std::uint64_t tokens) {
    observation.ForgetFrom(tokens);
    decided_until = std::min(decided_until.load(), tokens);
    looked_until = std::min(looked_until.load(), tokens);
    chosen_until = std::min(chosen_until, tokens);
    memory.CutTo(tokens, decided_until);
  }
  // All but what was shown.
  void TakeDecisionsOf(const LayerState& other) {
    memory = other.memory;
    decided_until = other.decided_until.load();
    looked_until = other.looked_until.load();
    refused = other.refused;
    chosen_until = other.chosen_until;
  }
};

}  // namespace tessera::compaction
