#include "client/model/shared_prompt.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "daemon/base/strings.h"

namespace tessera::llm {

namespace {

// Tokens per step that fit every tail ring.
constexpr std::size_t kMostTokens = 32;

absl::StatusOr<client::Sequence> ComputePrefix(const Model& model, client::Worker& worker,
                                               const client::Model& registered,
                                               const SharedPrompt& prompt) {
  absl::StatusOr<client::Sequence> sequence = worker.CreateSequence(registered, prompt.policy);
  if (!sequence.ok()) return sequence;
  const std::span<const TokenId> head = prompt.tokens.first(prompt.head);
  absl::Status status = Prefill(model, head, *sequence).status();
  if (status.ok()) status = sequence->Publish(head, prompt.publish).status();
  if (!status.ok()) return status;
  return sequence;
}

absl::StatusOr<client::Sequence> MatchPrefix(client::Worker& worker,
                                             const client::Model& registered,
                                             const SharedPrompt& prompt,
                                             client::ComputationId& computes) {
  const absl::StatusOr<client::PrefixMatch> match =
      worker.Match(registered, {.policy = prompt.policy,
                                .tokens = prompt.tokens.first(prompt.head),
                                .wait = prompt.wait,
                                .will_compute = true});
  if (!match.ok()) return match.status();
  computes = match->computation;
  if (match->tokens != prompt.head) return client::Sequence();
  absl::StatusOr<client::Sequence> fork = worker.Fork(*match);
  // Evicted since the match.
  if (absl::IsNotFound(fork.status())) return client::Sequence();
  return fork;
}

}  // namespace

absl::StatusOr<StartedPrompt> PrefillShared(const Model& model, client::Worker& worker,
                                            const client::Model& registered,
                                            const SharedPrompt& prompt) {
  if (prompt.head == 0 || prompt.head >= prompt.tokens.size()) {
    return absl::InvalidArgumentError(Concat("cannot share a prefix of ", prompt.head, " of ",
                                             prompt.tokens.size(),
                                             " tokens; share at least one, and not all of them"));
  }
  client::ComputationId computes;
  absl::StatusOr<client::Sequence> sequence = MatchPrefix(worker, registered, prompt, computes);
  if (!sequence.ok()) return sequence.status();
  const bool found = sequence->valid();
  if (!found) {
    sequence = ComputePrefix(model, worker, registered, prompt);
    if (!sequence.ok()) {
      // Release the workers that wait for this computation.
      if (computes.valid()) worker.Withdraw(computes).IgnoreError();
      return sequence.status();
    }
  }
  std::vector<float> logits;
  for (std::span<const TokenId> rest = prompt.tokens.subspan(prompt.head); !rest.empty();) {
    const std::size_t count = std::min(rest.size(), kMostTokens);
    const Turn turns[] = {{.sequence = &*sequence, .tokens = rest.first(count)}};
    absl::StatusOr<std::vector<float>> advanced = Advance(model, worker, turns);
    if (!advanced.ok()) return advanced.status();
    logits = *std::move(advanced);
    rest = rest.subspan(count);
  }
  return StartedPrompt{*std::move(sequence), std::move(logits), found};
}

}  // namespace tessera::llm
