// A prompt's rows, computed once, and compressed sequences with these rows, one for each policy.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "client/model/attention.h"
#include "client/model/checkpoint/tokenizer.h"
#include "tessera/worker.h"

namespace tessera::cli::eval {

// Attends exactly over its own rows, and keeps those of every layer.
class PromptRows final : public llm::Attention {
 public:
  explicit PromptRows(const llm::Config& config)
      : config_(config), key_(config.layers), value_(config.layers), query_(config.layers) {}

  absl::Status Attend(const llm::LayerRows& rows, std::span<float> output) override;
  // Forgets all rows but the first `tokens`.
  void Truncate(std::uint64_t tokens);
  std::uint64_t tokens() const { return key_[0].size() / config_.kv_row(); }

  // [tokens][kv_heads][head_dim], bf16.
  std::span<const std::uint16_t> key(std::uint32_t layer) const { return key_[layer]; }
  std::span<const std::uint16_t> value(std::uint32_t layer) const { return value_[layer]; }

  // Appends all rows to an empty sequence.
  absl::Status AppendTo(client::Sequence& sequence) const;
  // Has the sequence observe the queries of `tokens`, which are the prompt's.
  absl::Status ObserveIn(client::Sequence& sequence, std::span<const llm::TokenId> tokens) const;

 private:
  using Rows = std::vector<std::vector<std::uint16_t>>;  // [layers][tokens][heads][head_dim]
  llm::Config config_;
  Rows key_, value_, query_;
};

// Forks of one dense sequence with a prompt's rows. The prompt must outlive the object.
class CompressedForks {
 public:
  struct Fork {
    client::Sequence sequence;
    double bytes_kept = 1;   // share of the dense bytes
    std::string not_packed;  // why a policy that packs packed nothing; empty: it packed
  };

  static absl::StatusOr<CompressedForks> Create(const PromptRows& rows,
                                                std::span<const llm::TokenId> tokens,
                                                client::Worker& worker,
                                                const client::Model& registered);
  // INVALID_ARGUMENT if the policy cannot work on so few tokens.
  absl::StatusOr<Fork> Compress(const std::string& policy);

 private:
  CompressedForks(const PromptRows& rows, std::span<const llm::TokenId> tokens,
                  client::Sequence whole)
      : rows_(&rows), tokens_(tokens), whole_(std::move(whole)) {}
  // A fork under this policy with the observations it asks for. Policies that ask for the same
  // observations share them.
  absl::StatusOr<client::Sequence> Observed(const std::string& policy);

  const PromptRows* rows_;
  std::span<const llm::TokenId> tokens_;
  client::Sequence whole_;
  // Uncompressed forks with observations, by the needs that they cover.
  std::vector<std::pair<client::PolicyNeeds, client::Sequence>> observed_;
};

}  // namespace tessera::cli::eval
