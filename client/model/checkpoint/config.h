// The shape of a Llama or Qwen2 model, from config.json or a GGUF file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tessera/model.h"

namespace tessera::llm {

class Gguf;

struct Config {
  std::uint32_t vocabulary = 0;
  std::uint32_t hidden = 0;
  std::uint32_t mlp = 0;
  std::uint32_t layers = 0;
  std::uint32_t query_heads = 0;
  std::uint32_t kv_heads = 0;
  std::uint32_t head_dim = 0;
  std::uint32_t max_positions = 0;
  double rope_theta = 0;
  float norm_epsilon = 0;
  bool tied_output = false;  // the embedding is also the output matrix
  bool qkv_bias = false;     // queries, keys and values have biases

  std::uint32_t query_row() const { return query_heads * head_dim; }  // elements per token
  std::uint32_t kv_row() const { return kv_heads * head_dim; }
};

// INVALID_ARGUMENT names the member, its value and the limit. UNIMPLEMENTED names an unsupported
// feature: a model other than Llama and Qwen2, other biases, scaled RoPE, sliding windows,
// quantised weights, or an activation other than silu.
absl::StatusOr<Config> ReadConfig(const std::string& path);
absl::StatusOr<Config> ConfigOf(const Gguf& file);

// The geometry to register with the daemon: bf16, keys stored after RoPE. `delimiters`: tokens that
// end sentences.
client::ModelGeometry GeometryOf(const Config& config, const std::string& name,
                                 const std::vector<std::uint32_t>& delimiters = {});

}  // namespace tessera::llm
