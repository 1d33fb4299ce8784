// The loop of a worker: prefills a prompt, then decodes batches token by token through Tessera.
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

// Computes a prompt in this process and appends its K and V to the sequence, whose policy may start
// to compress it. Returns the logits of the next token. FAILED_PRECONDITION if the sequence is not
// empty. After any other error the sequence must be freed: its layers may differ in length.
absl::StatusOr<std::vector<float>> Prefill(const Model& model, std::span<const TokenId> prompt,
                                           client::Sequence& sequence);

// The next tokens of one sequence in a batch: one while decoding, several for a follow-up text, at
// most what the tail ring holds.
struct Turn {
  client::Sequence* sequence = nullptr;
  std::span<const TokenId> tokens;
};

// One step of a batch: appends the tokens and attends through Tessera. Returns the logits of the
// token after each turn, [turns][vocabulary]. Retries a step that the daemon aborts. Adds the time
// spent in Tessera (begin, append and attend, end) to `cache_seconds`, unless it is null.
absl::StatusOr<std::vector<float>> Advance(const Model& model, client::Worker& worker,
                                           std::span<const Turn> turns,
                                           double* cache_seconds = nullptr);

struct GenerateOptions {
  std::uint32_t max_tokens = 16;  // of each sequence
  std::optional<TokenId> stop;    // ends a sequence; included in its answer
  SamplerOptions sampler;         // sequence i uses seed + i
};

// Decodes a batch, starting from `logits`, [sequences][vocabulary], as returned by Prefill and
// Advance. The last token of each answer is not appended to its sequence.
absl::StatusOr<std::vector<std::vector<TokenId>>> Generate(
    const Model& model, client::Worker& worker, std::span<client::Sequence* const> sequences,
    std::vector<float> logits, const GenerateOptions& options = {});

}  // namespace tessera::llm
