// The seam between a model and its attention: a layer hands over Q, K and V and gets attention
// back. Implemented by local attention and by Tessera.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "client/model/checkpoint/config.h"
#include "tessera/sequence.h"
#include "tessera/step.h"

namespace tessera::llm {

// Rows of all tokens of a forward pass in one layer, bf16. RoPE is applied to keys and queries.
struct LayerRows {
  std::uint32_t layer = 0;
  std::span<const std::uint16_t> key;    // [tokens][kv_heads][head_dim]
  std::span<const std::uint16_t> value;  // the same
  std::span<const std::uint16_t> query;  // [tokens][query_heads][head_dim]
  // The same before they were rounded to bf16.
  std::span<const float> exact_key = {}, exact_value = {}, exact_query = {};
};

class Attention {
 public:
  virtual ~Attention() = default;
  // Appends the rows to the cache and writes attention to `output`,
  // [tokens][query_heads][head_dim]. Called once per layer and pass, in layer order.
  virtual absl::Status Attend(const LayerRows& rows, std::span<float> output) = 0;
};

// Exact causal attention in this process. The queries belong to the last tokens of the keys.
void AttendDense(const Config& config, const LayerRows& rows, std::span<float> output);

// The model without Tessera: a dense cache of one sequence in this process, for comparison.
class LocalAttention final : public Attention {
 public:
  explicit LocalAttention(const Config& config)
      : config_(config), keys_(config.layers), values_(config.layers) {}
  absl::Status Attend(const LayerRows& rows, std::span<float> output) override;

 private:
  const Config config_;
  std::vector<std::vector<std::uint16_t>> keys_;  // per layer
  std::vector<std::vector<std::uint16_t>> values_;
};

// Prefill: attention is computed in this process, as an engine would with its own kernels. Each
// layer's observations and rows go to the daemon, which can compress one layer while the next is
// computed. The sequence must be empty.
class PromptAttention final : public Attention {
 public:
  PromptAttention(const Config& config, client::Sequence& sequence)
      : config_(config), sequence_(sequence) {}
  absl::Status Attend(const LayerRows& rows, std::span<float> output) override;

 private:
  const Config config_;
  client::Sequence& sequence_;
};

// Decode: Tessera attends over the sequence's cache, including the rows just appended.
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
