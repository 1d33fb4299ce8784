// The forward pass of a Llama-family model: bf16 weights, fp32 arithmetic, one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/model/attention.h"
#include "client/model/checkpoint/config.h"
#include "client/model/checkpoint/safetensors.h"
#include "client/model/checkpoint/vocab.h"
#include "client/model/matrix.h"

namespace tessera::llm {

// The tokens of a forward pass: one sequence, or several sequences concatenated.
struct Pass {
  std::span<const TokenId> tokens;
  std::span<const std::uint32_t> positions;  // one per token
  std::span<const std::uint32_t> logits_of;  // indices of tokens whose logits are returned
};

// Immutable after Load; any thread may call it.
class Model {
 public:
  // Reads config.json and model.safetensors in `folder`, with Hugging Face tensor names.
  static absl::StatusOr<std::unique_ptr<Model>> Load(const std::string& folder);

  const Config& config() const { return config_; }

  // Returns logits, [logits_of][vocabulary]. INVALID_ARGUMENT for a token outside the vocabulary,
  // OUT_OF_RANGE for a position beyond the model's; otherwise the error of `attention`.
  absl::StatusOr<std::vector<float>> Forward(const Pass& pass, Attention& attention) const;

 private:
  struct Layer {
    std::vector<float> attention_norm, mlp_norm;
    Panels query, key, value, output;
    Panels gate, up, down;
  };
  struct Rotary;  // RoPE cosines and sines of a pass's positions

  Model(const Config& config, Safetensors file) : config_(config), file_(std::move(file)) {}
  absl::Status LoadWeights();
  absl::StatusOr<Layer> LoadLayer(std::uint32_t index) const;
  absl::StatusOr<Panels> Matrix(const std::string& name, std::uint64_t in, std::uint64_t out) const;
  absl::StatusOr<std::vector<float>> Vector(const std::string& name) const;

  absl::Status CheckPass(const Pass& pass) const;
  std::vector<float> Embed(std::span<const TokenId> tokens) const;
  absl::Status AddAttention(std::uint32_t index, const Rotary& rotary, Attention& attention,
                            std::span<float> hidden) const;
  void AddMlp(const Layer& layer, std::span<float> hidden) const;
  std::vector<float> Normalised(std::span<const float> hidden,
                                const std::vector<float>& weights) const;

  const Config config_;
  const Safetensors file_;
  std::span<const std::uint16_t> embedding_;  // points into the mapped file
  std::vector<Layer> layers_;
  std::vector<float> last_norm_;
  Panels output_;
};

}  // namespace tessera::llm
