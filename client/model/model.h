// The forward pass of a Llama or Qwen2 model: weights as the file stores them, fp32 arithmetic, one
// thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/model/attention.h"
#include "client/model/checkpoint/checkpoint.h"
#include "client/model/checkpoint/tokenizer.h"
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
  // `path`: a GGUF file, or a folder with config.json and model.safetensors.
  static absl::StatusOr<std::unique_ptr<Model>> Load(const std::string& path);

  const Config& config() const { return files_.config(); }

  // Returns logits, [logits_of][vocabulary]. INVALID_ARGUMENT for a token outside the vocabulary,
  // OUT_OF_RANGE for a position beyond the model's; otherwise the error of `attention`.
  absl::StatusOr<std::vector<float>> Forward(const Pass& pass, Attention& attention) const;

 private:
  struct Layer {
    std::vector<float> attention_norm, mlp_norm;
    Panels query, key, value, output;
    std::vector<float> query_bias, key_bias, value_bias;  // empty: none
    Panels gate, up, down;
  };
  struct Rotary;  // RoPE cosines and sines of a pass's positions

  explicit Model(Checkpoint files) : files_(std::move(files)) {}
  absl::Status LoadWeights();
  absl::StatusOr<Layer> LoadLayer(std::uint32_t index) const;
  // `heads`: of a query or key matrix or bias, whose rows may be stored in another order; 0: rows
  // are in order.
  absl::StatusOr<Panels> Matrix(const std::string& name, std::uint64_t in, std::uint64_t out,
                                std::uint32_t heads = 0) const;
  absl::StatusOr<std::vector<float>> Vector(const std::string& name, std::uint64_t size,
                                            std::uint32_t heads = 0) const;
  // Where row `row` of a matrix is stored.
  std::uint64_t StoredRow(std::uint64_t row, std::uint32_t heads) const;

  absl::Status CheckPass(const Pass& pass) const;
  std::vector<float> Embed(std::span<const TokenId> tokens) const;
  absl::Status AddAttention(std::uint32_t index, const Rotary& rotary, Attention& attention,
                            std::span<float> hidden) const;
  void AddMlp(const Layer& layer, std::span<float> hidden) const;
  std::vector<float> Normalised(std::span<const float> hidden,
                                const std::vector<float>& weights) const;

  const Checkpoint files_;
  Tensor embedding_;  // points into the mapped file
  std::vector<Layer> layers_;
  std::vector<float> last_norm_;
  Panels output_;
};

}  // namespace tessera::llm
