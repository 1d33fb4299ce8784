#include "client/model/checkpoint/config.h"

#include "absl/status/status.h"
#include "client/model/checkpoint/gguf.h"
#include "client/model/checkpoint/json.h"
#include "daemon/base/strings.h"

namespace tessera::llm {

namespace {

// Whether a member is absent, null or false.
bool Unset(const Json& json, const std::string& key) {
  const JsonValue* value = Find(json, key);
  return value == nullptr || value->has_null_value() ||
         (value->has_bool_value() && !value->bool_value());
}

std::string KindOf(const Json& json) {
  const JsonValue* kind = Find(json, "model_type");
  return kind == nullptr ? "llama" : kind->string_value();
}

absl::Status CheckKind(const Json& json) {
  const JsonValue* activation = Find(json, "hidden_act");
  if (activation != nullptr && activation->string_value() != "silu") {
    return absl::UnimplementedError(
        Concat("hidden_act ", Quoted(activation->string_value()), ": only silu is supported"));
  }
  const std::string kind = KindOf(json);
  if (kind != "llama" && kind != "qwen2") {
    return absl::UnimplementedError(
        Concat("model_type ", Quoted(kind), ": only llama and qwen2 are supported"));
  }
  for (const char* const key :
       {"attention_bias", "mlp_bias", "rope_scaling", "rope_parameters", "quantization_config"}) {
    if (!Unset(json, key)) return absl::UnimplementedError(Concat(key, " is not supported"));
  }
  // Qwen2 names a window and, beside it, whether it is used.
  const bool has_window = Find(json, "use_sliding_window") == nullptr
                              ? !Unset(json, "sliding_window")
                              : !Unset(json, "use_sliding_window");
  if (has_window) return absl::UnimplementedError("sliding_window is not supported");
  return absl::OkStatus();
}

// What both kinds of file must satisfy.
absl::Status CheckConfig(const Config& config) {
  if (config.query_heads % config.kv_heads != 0 || config.head_dim % 2 != 0) {
    return absl::InvalidArgumentError(
        Concat(config.query_heads, " query heads, ", config.kv_heads, " kv heads, head_dim ",
               config.head_dim,
               ": query heads must be a multiple of kv heads, and head_dim must be even"));
  }
  if (!(config.rope_theta > 1) || !(config.norm_epsilon > 0)) {
    return absl::InvalidArgumentError(Concat("rope_theta is ", config.rope_theta,
                                             " and rms_norm_eps ", config.norm_epsilon,
                                             "; they must be above 1 and 0"));
  }
  return absl::OkStatus();
}

absl::Status SetCount(const std::string& key, const absl::StatusOr<std::uint64_t>& count,
                      std::uint32_t max, std::uint32_t& field) {
  if (!count.ok()) return count.status();
  if (*count == 0 || *count > max) {
    return absl::InvalidArgumentError(
        Concat("\"", key, "\" is ", *count, "; it must be from 1 to ", max));
  }
  field = static_cast<std::uint32_t>(*count);
  return absl::OkStatus();
}

constexpr std::uint32_t kMaxVocabulary = 1 << 20, kMaxHidden = 1 << 16, kMaxMlp = 1 << 18;
constexpr std::uint32_t kMaxLayers = 1024, kMaxHeads = 1024, kMaxHeadDim = 256;
constexpr std::uint32_t kMaxPositions = 1 << 24;

absl::StatusOr<Config> FromJson(const Json& json) {
  if (absl::Status status = CheckKind(json); !status.ok()) return status;
  Config config;
  const struct {
    const char* key;
    std::uint32_t& field;
    std::uint32_t max;
    // The default of a member that older files omit, from the members before it.
    std::uint32_t (*implied)(const Config&) = nullptr;
  } counts[] = {
      {"vocab_size", config.vocabulary, kMaxVocabulary},
      {"hidden_size", config.hidden, kMaxHidden},
      {"intermediate_size", config.mlp, kMaxMlp},
      {"num_hidden_layers", config.layers, kMaxLayers},
      {"num_attention_heads", config.query_heads, kMaxHeads},
      {"num_key_value_heads", config.kv_heads, kMaxHeads,
       [](const Config& c) { return c.query_heads; }},
      {"head_dim", config.head_dim, kMaxHeadDim,
       [](const Config& c) { return c.hidden / c.query_heads; }},
      {"max_position_embeddings", config.max_positions, kMaxPositions},
  };
  for (const auto& [key, field, max, implied] : counts) {
    const bool left_out = implied != nullptr && Find(json, key) == nullptr;
    const absl::StatusOr<std::uint64_t> count = left_out ? implied(config) : Count(json, key);
    if (absl::Status status = SetCount(key, count, max, field); !status.ok()) return status;
  }
  const absl::StatusOr<double> theta = Number(json, "rope_theta");
  const absl::StatusOr<double> epsilon = Number(json, "rms_norm_eps");
  if (!theta.ok()) return theta.status();
  if (!epsilon.ok()) return epsilon.status();
  config.rope_theta = *theta;
  config.norm_epsilon = static_cast<float>(*epsilon);
  config.tied_output = !Unset(json, "tie_word_embeddings");
  config.qkv_bias = KindOf(json) == "qwen2";
  if (absl::Status status = CheckConfig(config); !status.ok()) return status;
  return config;
}

}  // namespace

absl::StatusOr<Config> ReadConfig(const std::string& path) {
  const absl::StatusOr<Json> json = ReadJsonFile(path);
  if (!json.ok()) return json.status();
  absl::StatusOr<Config> config = FromJson(*json);
  if (config.ok()) return config;
  return absl::Status(config.status().code(),
                      Concat("\"", path, "\": ", config.status().message()));
}

absl::StatusOr<Config> ConfigOf(const Gguf& file) {
  const absl::StatusOr<std::string_view> kind = file.Text("general.architecture");
  if (!kind.ok()) return kind.status();
  if (*kind != "llama" && *kind != "qwen2") {
    return absl::UnimplementedError(
        Concat("architecture ", Quoted(*kind), ": only llama and qwen2 are supported"));
  }
  const std::string prefix(*kind);
  const bool scaled = file.Text(prefix + ".rope.scaling.type").value_or("none") != "none";
  if (scaled || file.FindTensor("rope_freqs.weight") != nullptr) {
    return absl::UnimplementedError("scaled RoPE is not supported");
  }
  if (file.Count(prefix + ".expert_count").value_or(0) != 0) {
    return absl::UnimplementedError("experts are not supported");
  }
  Config config;
  const struct {
    const char* key;
    std::uint32_t& field;
    std::uint32_t max;
  } counts[] = {{".embedding_length", config.hidden, kMaxHidden},
                {".feed_forward_length", config.mlp, kMaxMlp},
                {".block_count", config.layers, kMaxLayers},
                {".attention.head_count", config.query_heads, kMaxHeads},
                {".attention.head_count_kv", config.kv_heads, kMaxHeads},
                {".context_length", config.max_positions, kMaxPositions}};
  for (const auto& [key, field, max] : counts) {
    const absl::Status status = SetCount(prefix + key, file.Count(prefix + key), max, field);
    if (!status.ok()) return status;
  }
  const std::string dim = prefix + ".attention.key_length";
  absl::Status status = SetCount(
      dim, file.FindValue(dim) == nullptr ? config.hidden / config.query_heads : file.Count(dim),
      kMaxHeadDim, config.head_dim);
  if (!status.ok()) return status;
  const std::uint64_t rotated =
      file.Count(prefix + ".rope.dimension_count").value_or(config.head_dim);
  if (rotated != config.head_dim) {
    return absl::UnimplementedError(
        Concat("RoPE of ", rotated, " of ", config.head_dim, " channels is not supported"));
  }
  const Tensor* const embedding = file.FindTensor("token_embd.weight");
  if (embedding == nullptr || embedding->shape.size() != 2) {
    return absl::InvalidArgumentError("tensor \"token_embd.weight\" is missing or no matrix");
  }
  status = SetCount("token_embd.weight", embedding->shape[0], kMaxVocabulary, config.vocabulary);
  if (!status.ok()) return status;
  const absl::StatusOr<double> theta = file.Number(prefix + ".rope.freq_base");
  const absl::StatusOr<double> epsilon = file.Number(prefix + ".attention.layer_norm_rms_epsilon");
  if (!theta.ok()) return theta.status();
  if (!epsilon.ok()) return epsilon.status();
  config.rope_theta = *theta;
  config.norm_epsilon = static_cast<float>(*epsilon);
  config.tied_output = file.FindTensor("output.weight") == nullptr;
  config.qkv_bias = file.FindTensor("blk.0.attn_q.bias") != nullptr;
  status = CheckConfig(config);
  if (!status.ok()) return status;
  return config;
}

client::ModelGeometry GeometryOf(const Config& config, const std::string& name,
                                 const std::vector<std::uint32_t>& delimiters) {
  const client::LayerGeometry layer = {
      .query_heads = config.query_heads, .kv_heads = config.kv_heads, .head_dim = config.head_dim};
  return {.name = name,
          .type = client::ElementType::kBf16,
          .layers = std::vector<client::LayerGeometry>(config.layers, layer),
          .rope = {.theta = config.rope_theta},
          .delimiter_token_ids = delimiters};
}

}  // namespace tessera::llm
