// What a checkpoint's config.json says of a Llama model.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tessera/model.h"

namespace tessera::llm {

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
  bool tied_output = false;  // the embedding is the output matrix, too

  std::uint32_t query_row() const { return query_heads * head_dim; }  // elements of a token
  std::uint32_t kv_row() const { return kv_heads * head_dim; }
};

// INVALID_ARGUMENT names the member, its value and the limit; UNIMPLEMENTED what this worker does
// not compute: other models than Llama, biases, scaled rotary positions, windows, quantised
// weights, another activation.
absl::StatusOr<Config> ReadConfig(const std::string& path);

// The model as the daemon is told of it. Keys are held after rotation, bf16. `delimiters`: tokens
// that end sentences.
client::ModelGeometry GeometryOf(const Config& config, const std::string& name,
                                 const std::vector<std::uint32_t>& delimiters = {});

}  // namespace tessera::llm
