// The loop of a worker: prefill a prompt, then decode token by token, the cache being Tessera's.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "client/model/model.h"
#include "client/model/sampler.h"
#include "tessera/worker.h"

namespace tessera::llm {

// Computes a prompt in this process and hands its K and V to the sequence, whose policy may
// compress it then. The sequence must be empty (FAILED_PRECONDITION) and is of no use after an
// error. Logits of the token that follows.
absl::StatusOr<std::vector<float>> Prefill(const Model& model, std::span<const TokenId> prompt,
                                           client::Sequence& sequence);

// The next tokens of one sequence of a batch: one while decoding, several where more text follows,
// no more than its tail ring takes.
struct Turn {
  client::Sequence* sequence = nullptr;
  std::span<const TokenId> tokens;
};

// One step of a batch: appends the tokens and attends through Tessera. Logits of the token that
// follows each turn, [turns][vocabulary]. A step that the daemon aborts is done again.
absl::StatusOr<std::vector<float>> Advance(const Model& model, client::Worker& worker,
                                           std::span<const Turn> turns);

struct GenerateOptions {
  std::uint32_t max_tokens = 16;  // of each sequence
  std::optional<TokenId> stop;    // a sequence ends with it
  SamplerOptions sampler;         // sequence i draws from seed + i
};

// Goes on with a batch from `logits`, [sequences][vocabulary], as Prefill and Advance give them.
// The last token of each answer is not in its sequence yet.
absl::StatusOr<std::vector<std::vector<TokenId>>> Generate(
    const Model& model, client::Worker& worker, std::span<client::Sequence* const> sequences,
    std::vector<float> logits, const GenerateOptions& options = {});

}  // namespace tessera::llm
