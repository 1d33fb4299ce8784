#include "client/model/checkpoint/checkpoint.h"

#include <filesystem>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "daemon/base/strings.h"

namespace tessera::llm {

namespace {

constexpr std::string_view kLayer = "model.layers.";

constexpr std::pair<std::string_view, std::string_view> kNames[] = {
    {"model.embed_tokens", "token_embd"},
    {"model.norm", "output_norm"},
    {"lm_head", "output"},
    {"self_attn.q_proj", "attn_q"},
    {"self_attn.k_proj", "attn_k"},
    {"self_attn.v_proj", "attn_v"},
    {"self_attn.o_proj", "attn_output"},
    {"mlp.gate_proj", "ffn_gate"},
    {"mlp.up_proj", "ffn_up"},
    {"mlp.down_proj", "ffn_down"},
    {"input_layernorm", "attn_norm"},
    {"post_attention_layernorm", "ffn_norm"},
};

// "model.layers.3.mlp.up_proj.weight" is "blk.3.ffn_up.weight".
std::string GgufName(std::string_view name) {
  std::string prefix;
  if (name.starts_with(kLayer)) {
    name.remove_prefix(kLayer.size());
    const std::size_t dot = name.find('.');
    prefix = Concat("blk.", name.substr(0, dot), ".");
    name.remove_prefix(dot + 1);
  }
  for (const auto& [hugging_face, gguf] : kNames) {
    if (!name.starts_with(hugging_face)) continue;
    return Concat(prefix, gguf, name.substr(hugging_face.size()));
  }
  return Concat(prefix, name);
}

}  // namespace

absl::StatusOr<Checkpoint> Checkpoint::Open(const std::string& path) {
  Checkpoint checkpoint;
  checkpoint.path_ = path;
  std::error_code error;
  if (std::filesystem::is_regular_file(path, error)) {
    absl::StatusOr<Gguf> file = Gguf::Open(path);
    if (!file.ok()) return file.status();
    const absl::StatusOr<Config> config = ConfigOf(*file);
    if (!config.ok()) {
      return absl::Status(config.status().code(),
                          Concat("\"", path, "\": ", config.status().message()));
    }
    checkpoint.config_ = *config;
    // Qwen2's files keep the order of Hugging Face.
    checkpoint.has_interleaved_heads_ = file->Text("general.architecture").value_or("") == "llama";
    checkpoint.gguf_ = *std::move(file);
    return checkpoint;
  }
  const absl::StatusOr<Config> config = ReadConfig(path + "/config.json");
  if (!config.ok()) return config.status();
  absl::StatusOr<Safetensors> file = Safetensors::Open(path + "/model.safetensors");
  if (!file.ok()) return file.status();
  checkpoint.config_ = *config;
  checkpoint.safetensors_ = *std::move(file);
  return checkpoint;
}

absl::StatusOr<Tensor> Checkpoint::Find(const std::string& name,
                                        const std::vector<std::uint64_t>& shape) const {
  Tensor tensor;
  if (safetensors_) {
    absl::StatusOr<Tensor> found = safetensors_->FindTensor(name);
    if (!found.ok()) return found.status();
    tensor = *std::move(found);
  } else {
    const Tensor* const found = gguf_->FindTensor(GgufName(name));
    if (found == nullptr) {
      return absl::NotFoundError(Concat("\"", path_, "\" has no tensor ", Quoted(GgufName(name))));
    }
    tensor = *found;
  }
  if (tensor.shape != shape) {
    return absl::InvalidArgumentError(Concat("\"", path_, "\": tensor ", Quoted(name), " is ",
                                             NameOf(tensor.type), " of ", ShapeText(tensor.shape),
                                             "; ", ShapeText(shape), " is required"));
  }
  return tensor;
}

}  // namespace tessera::llm
