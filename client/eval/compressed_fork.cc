#include "client/eval/compressed_fork.h"

#include "absl/status/status.h"

namespace tessera::cli::eval {

namespace {

// Why a policy that packs packed nothing; else empty.
std::string WhyNotPacked(const client::CompressResult& compressed) {
  for (const client::OutcomeGroup& group : compressed.outcomes) {
    const bool tried = group.worst.reason == client::CompressionReason::kSegmentOverhead ||
                       group.worst.reason == client::CompressionReason::kLossAboveLimit;
    if (!tried || group.worst.compressed_entries > 0) return "";
  }
  return compressed.outcomes.empty() ? "" : compressed.outcomes[0].worst.text;
}

}  // namespace

absl::Status PromptRows::Attend(const llm::LayerRows& rows, std::span<float> output) {
  const std::pair<std::span<const std::uint16_t>, Rows*> kinds[] = {
      {rows.key, &key_}, {rows.value, &value_}, {rows.query, &query_}};
  for (const auto& [from, to] : kinds) {
    std::vector<std::uint16_t>& layer = (*to)[rows.layer];
    layer.insert(layer.end(), from.begin(), from.end());
  }
  llm::AttendDense(config_,
                   {.layer = rows.layer,
                    .key = key_[rows.layer],
                    .value = value_[rows.layer],
                    .query = rows.query},
                   output);
  return absl::OkStatus();
}

void PromptRows::Truncate(std::uint64_t tokens) {
  for (std::uint32_t layer = 0; layer < config_.layers; ++layer) {
    key_[layer].resize(tokens * config_.kv_row());
    value_[layer].resize(tokens * config_.kv_row());
    query_[layer].resize(tokens * config_.query_row());
  }
}

absl::Status PromptRows::AppendTo(client::Sequence& sequence) const {
  for (std::uint32_t layer = 0; layer < config_.layers; ++layer) {
    const absl::Status status = sequence
                                    .Append({.key = std::as_bytes(std::span(key_[layer])),
                                             .value = std::as_bytes(std::span(value_[layer])),
                                             .tokens = tokens(),
                                             .first_layer = layer,
                                             .layers = 1})
                                    .status();
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status PromptRows::ObserveIn(client::Sequence& sequence,
                                   std::span<const llm::TokenId> tokens) const {
  absl::Status status = sequence.ObserveTokens(0, tokens);
  for (std::uint32_t layer = 0; status.ok() && layer < config_.layers; ++layer) {
    status = sequence.Observe({.layer = layer,
                               .query = std::as_bytes(std::span(query_[layer])),
                               .key = std::as_bytes(std::span(key_[layer])),
                               .prompt_tokens = tokens.size()});
  }
  return status;
}

absl::StatusOr<CompressedForks> CompressedForks::Create(const PromptRows& rows,
                                                        std::span<const llm::TokenId> tokens,
                                                        client::Worker& worker,
                                                        const client::Model& registered) {
  absl::StatusOr<client::Sequence> whole = worker.CreateSequence(registered, "dense");
  if (!whole.ok()) return whole.status();
  if (absl::Status status = rows.AppendTo(*whole); !status.ok()) return status;
  return CompressedForks(rows, tokens, *std::move(whole));
}

absl::StatusOr<client::Sequence> CompressedForks::Observed(const std::string& policy) {
  absl::StatusOr<client::Sequence> fork = whole_.Fork(policy);
  if (!fork.ok()) return fork.status();
  const client::PolicyNeeds needs = fork->needs();
  if (needs == client::PolicyNeeds()) return fork;
  for (auto& [known, sequence] : observed_) {
    if (known == needs) return sequence.Fork(policy);
  }
  if (absl::Status status = rows_->ObserveIn(*fork, tokens_); !status.ok()) return status;
  absl::StatusOr<client::Sequence> next = fork->Fork();
  if (next.ok()) observed_.emplace_back(needs, *std::move(fork));
  return next;
}

absl::StatusOr<CompressedForks::Fork> CompressedForks::Compress(const std::string& policy) {
  absl::StatusOr<client::Sequence> sequence = Observed(policy);
  if (!sequence.ok()) return sequence.status();
  const absl::StatusOr<client::CompressResult> compressed = sequence->Compress();
  if (!compressed.ok()) return compressed.status();
  const bool later = sequence->needs().acts_while_decoding;
  for (const client::OutcomeGroup& group : compressed->outcomes) {
    // The policy has no budget for so few tokens: that is its answer.
    if (group.worst.reason == client::CompressionReason::kTooShort && !later) {
      return absl::InvalidArgumentError(group.worst.text);
    }
  }
  const absl::StatusOr<client::SequenceDescription> described = sequence->Describe();
  if (!described.ok()) return described.status();
  return Fork{*std::move(sequence), described->bytes_kept, WhyNotPacked(*compressed)};
}

}  // namespace tessera::cli::eval
