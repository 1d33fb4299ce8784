// Per-layer state of a managed sequence: what the worker has observed, and what was decided by it.
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
  // The policy has decided about all tokens before this one. Read by any thread.
  std::atomic<std::uint64_t> decided_until{0};
  // The policy has considered all tokens before this one. Those that it did not decide about wait
  // for the end of the next prompt.
  std::atomic<std::uint64_t> considered_until{0};
  // Why the last decision left all tokens waiting, if its budget was too small for them.
  absl::Status refused;
  // Decisions depend on all tokens before this one: entries were dropped by them, or scores were
  // learned from queries up to here.
  std::uint64_t depends_until = 0;
  Observation observation;

  // The sequence was truncated to `tokens`.
  void CutTo(std::uint64_t tokens) {
    observation.ForgetFrom(tokens);
    decided_until = std::min(decided_until.load(), tokens);
    considered_until = std::min(considered_until.load(), tokens);
    depends_until = std::min(depends_until, tokens);
    memory.CutTo(tokens, decided_until);
  }
  // Copies everything but the observation.
  void AdoptDecisions(const LayerState& other) {
    memory = other.memory;
    decided_until = other.decided_until.load();
    considered_until = other.considered_until.load();
    refused = other.refused;
    depends_until = other.depends_until;
  }
};

}  // namespace tessera::compaction
