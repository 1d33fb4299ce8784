// A prompt that starts with a shared prefix: forks the published prefix, or computes and publishes
// it.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/model/generate.h"
#include "tessera/worker.h"

namespace tessera::llm {

struct SharedPrompt {
  std::span<const TokenId> tokens;
  // Tokens of the prefix: at least one, and fewer than all, since the last token gives the logits.
  std::uint64_t head = 0;
  std::string policy;  // as in CreateSequence
  // How long to wait while another worker computes the prefix.
  std::chrono::milliseconds wait{60000};
  client::PublishOptions publish = {};
};

struct StartedPrompt {
  client::Sequence sequence;
  std::vector<float> logits;  // of the next token
  bool found = false;         // the prefix had been published
};

// Matches the whole prefix or computes the whole prefix. The remaining tokens attend through
// Tessera, over the prefix as its policy compressed it.
absl::StatusOr<StartedPrompt> PrefillShared(const Model& model, client::Worker& worker,
                                            const client::Model& registered,
                                            const SharedPrompt& prompt);

}  // namespace tessera::llm
