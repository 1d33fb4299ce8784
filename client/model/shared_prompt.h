// A prompt whose head other workers have, or may want: found where one of them has published it,
// else computed here and published.
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
  // The first so many are the head, fewer than there are: the last one answers.
  std::uint64_t head = 0;
  std::string policy;  // as CreateSequence takes it
  // How long to wait where another worker computes the head now.
  std::chrono::milliseconds wait{60000};
  client::PublishOptions publish = {};
};

struct StartedPrompt {
  client::Sequence sequence;
  std::vector<float> logits;  // of the token that follows
  bool found = false;         // the head was there
};

// A head is found whole or computed whole. What its policy makes of it is done when the rest
// follows, which Tessera attends for.
absl::StatusOr<StartedPrompt> PrefillShared(const Model& model, client::Worker& worker,
                                            const client::Model& registered,
                                            const SharedPrompt& prompt);

}  // namespace tessera::llm
