// Where a model's layers hand their K, V and queries, and get attention back. An engine has one
// such seam; here the worker's own attention and Tessera's stand behind it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "client/model/checkpoint/config.h"
#include "tessera/sequence.h"
#include "tessera/step.h"

namespace tessera::llm {

// One layer of a forward pass: rows of all of its tokens, bf16. Keys and queries are rotated.
struct LayerRows {
  std::uint32_t layer = 0;
  std::span<const std::uint16_t> key;    // [tokens][kv_heads][head_dim]
  std::span<const std::uint16_t> value;  // the same
  std::span<const std::uint16_t> query;  // [tokens][query_heads][head_dim]
};

class Attention {
 public:
  virtual ~Attention() = default;
  // Adds the rows to the cache and attends: `output` is [tokens][query_heads][head_dim]. Layers
  // come in order, each once a pass.
  virtual absl::Status Attend(const LayerRows& rows, std::span<float> output) = 0;
};

// Causal attention over rows that this process holds: the queries are those of the last tokens.
void AttendDense(const Config& config, const LayerRows& rows, std::span<float> output);

// The model alone: a dense cache of one sequence in this process. For comparison.
class OwnAttention final : public Attention {
 public:
  explicit OwnAttention(const Config& config)
      : config_(config), keys_(config.layers), values_(config.layers) {}
  absl::Status Attend(const LayerRows& rows, std::span<float> output) override;

 private:
  const Config config_;
  std::vector<std::vector<std::uint16_t>> keys_;  // per layer
  std::vector<std::vector<std::uint16_t>> values_;
};

// A prompt: this process attends by itself, as engines have their own kernels for that. Layer by
// layer the sequence is shown what its policy wants to see, and the daemon is handed the rows, of
// which it can compress one layer while the next is computed. The sequence must be empty.
class PromptAttention final : public Attention {
 public:
  PromptAttention(const Config& config, client::Sequence& sequence)
      : config_(config), sequence_(sequence) {}
  absl::Status Attend(const LayerRows& rows, std::span<float> output) override;

 private:
  const Config config_;
  client::Sequence& sequence_;
};

// Everything after: Tessera attends over what the daemon holds, and over the rows just written.
class StepAttention final : public Attention {
 public:
  explicit StepAttention(client::Step& step) : step_(step) {}
  absl::Status Attend(const LayerRows& rows, std::span<float> output) override {
    return step_.AppendAndAttend(rows.layer, {.key = std::as_bytes(rows.key),
                                              .value = std::as_bytes(rows.value),
                                              .query = std::as_bytes(rows.query),
                                              .output = std::as_writable_bytes(output)});
  }

 private:
  client::Step& step_;
};

}  // namespace tessera::llm
