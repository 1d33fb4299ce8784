// Generates texts through several caches at once, and measures how far each goes from exact
// attention over its own text.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "client/eval/compressed_fork.h"
#include "client/eval/text/fp8_cache.h"
#include "client/model/model.h"
#include "tessera/worker.h"

namespace tessera::cli::eval {

struct GeneratedText {
  std::vector<llm::TokenId> tokens;  // the likeliest ones
  // Mean KL divergence from exact attention over the prompt and these tokens, in nats.
  double divergence = 0;
};

struct GenerateTexts {
  const llm::Model& model;
  client::Worker& worker;
  const PromptRows& prompt;  // exact rows
  llm::TokenId next = 0;     // the token after the prompt
  std::uint32_t count = 0;   // tokens to generate
};
// One text per sequence, then one of the yardstick, unless it is null. The sequences and the
// yardstick hold the prompt; the text becomes a part of them.
absl::StatusOr<std::vector<GeneratedText>> Generate(const GenerateTexts& what,
                                                    std::span<client::Sequence* const> sequences,
                                                    Fp8Cache* yardstick);

}  // namespace tessera::cli::eval
