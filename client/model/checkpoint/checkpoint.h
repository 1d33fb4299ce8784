// The files of a model: a GGUF file, or a folder with config.json and model.safetensors.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/model/checkpoint/config.h"
#include "client/model/checkpoint/gguf.h"
#include "client/model/checkpoint/safetensors.h"
#include "client/model/checkpoint/tensor.h"

namespace tessera::llm {

class Checkpoint {
 public:
  static absl::StatusOr<Checkpoint> Open(const std::string& path);

  const Config& config() const { return config_; }

  // By its Hugging Face name. NOT_FOUND if it does not exist, INVALID_ARGUMENT if its shape
  // differs. Points into the mapped file.
  absl::StatusOr<Tensor> Find(const std::string& name,
                              const std::vector<std::uint64_t>& shape) const;

  // Whether row 2i + h of a head in the query and key matrices is row h * head_dim / 2 + i of the
  // Hugging Face matrix, as in GGUF files of Llama models.
  bool has_interleaved_heads() const { return has_interleaved_heads_; }

 private:
  Checkpoint() = default;

  std::string path_;
  Config config_;
  std::optional<Gguf> gguf_;
  std::optional<Safetensors> safetensors_;
  bool has_interleaved_heads_ = false;
};

}  // namespace tessera::llm
