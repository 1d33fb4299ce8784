#include "client/model/checkpoint/config.h"

#include "absl/status/status.h"
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

absl::Status CheckKind(const Json& json) {
  const JsonValue* activation = Find(json, "hidden_act");
  if (activation != nullptr && activation->string_value() != "silu") {
    return absl::UnimplementedError(
        Concat("hidden_act ", Quoted(activation->string_value()), ": only silu is supported"));
  }
  const JsonValue* kind = Find(json, "model_type");
  if (kind != nullptr && kind->string_value() != "llama") {
    return absl::UnimplementedError(
        Concat("model_type ", Quoted(kind->string_value()), ": only llama is supported"));
  }
  for (const char* const key : {"attention_bias", "mlp_bias", "rope_scaling", "rope_parameters",
                                "sliding_window", "quantization_config"}) {
    if (!Unset(json, key)) return absl::UnimplementedError(Concat(key, " is not supported"));
  }
  return absl::OkStatus();
}

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
      {"vocab_size", config.vocabulary, 1 << 20},
      {"hidden_size", config.hidden, 1 << 16},
      {"intermediate_size", config.mlp, 1 << 18},
      {"num_hidden_layers", config.layers, 1024},
      {"num_attention_heads", config.query_heads, 1024},
      {"num_key_value_heads", config.kv_heads, 1024, [](const Config& c) { return c.query_heads; }},
      {"head_dim", config.head_dim, 256, [](const Config& c) { return c.hidden / c.query_heads; }},
      {"max_position_embeddings", config.max_positions, 1 << 24},
  };
  for (const auto& [key, field, max, implied] : counts) {
    const bool left_out = implied != nullptr && Find(json, key) == nullptr;
    const absl::StatusOr<std::uint64_t> count = left_out ? implied(config) : Count(json, key);
    if (!count.ok()) return count.status();
    if (*count == 0 || *count > max) {
      return absl::InvalidArgumentError(
          Concat("\"", key, "\" is ", *count, "; it must be from 1 to ", max));
    }
    field = static_cast<std::uint32_t>(*count);
  }
  if (config.query_heads % config.kv_heads != 0 || config.head_dim % 2 != 0) {
    return absl::InvalidArgumentError(
        Concat(config.query_heads, " query heads, ", config.kv_heads, " kv heads, head_dim ",
               config.head_dim,
               ": query heads must be a multiple of kv heads, and head_dim must be even"));
  }
  const absl::StatusOr<double> theta = Number(json, "rope_theta");
  const absl::StatusOr<double> epsilon = Number(json, "rms_norm_eps");
  if (!theta.ok()) return theta.status();
  if (!epsilon.ok()) return epsilon.status();
  if (!(*theta > 1) || !(*epsilon > 0)) {
    return absl::InvalidArgumentError(Concat("rope_theta is ", *theta, " and rms_norm_eps ",
                                             *epsilon, "; they must be above 1 and 0"));
  }
  config.rope_theta = *theta;
  config.norm_epsilon = static_cast<float>(*epsilon);
  config.tied_output = !Unset(json, "tie_word_embeddings");
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
