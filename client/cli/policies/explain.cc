// tessera explain, tessera policies check: what a policy makes of a model's prompt.

#include "client/cli/policies/explain.h"

#include <cmath>
#include <string>
#include <string_view>
#include <utility>

#include "client/cli/command.h"
#include "client/cli/policies/policy_estimate.h"
#include "client/model/checkpoint/json.h"
#include "client/tools/output.h"
#include "client/tools/run_command.h"
#include "client/tools/table.h"
#include "daemon/base/bytes.h"
#include "daemon/base/strings.h"
#include "daemon/policies/grammar/parse.h"

namespace tessera::cli {

namespace {

constexpr std::uint64_t kMostHeads = 65536;
constexpr std::uint64_t kMostLayers = 4096;
constexpr std::uint64_t kMostTokens = std::uint64_t{1} << 32;

struct NamedType {
  std::string_view name;   // of --type
  std::string_view torch;  // in a config.json
  kernels::ElementType type;
};
constexpr NamedType kTypes[] = {{"bf16", "bfloat16", kernels::ElementType::kBf16},
                                {"fp16", "float16", kernels::ElementType::kFp16},
                                {"fp32", "float32", kernels::ElementType::kFp32}};

std::string_view NameOf(kernels::ElementType type) {
  for (const NamedType& named : kTypes) {
    if (named.type == type) return named.name;
  }
  return "?";
}

absl::StatusOr<kernels::ElementType> TypeNamed(std::string_view text) {
  for (const NamedType& named : kTypes) {
    if (text == named.name || text == named.torch) return named.type;
  }
  return absl::InvalidArgumentError(Concat(Quoted(text), " must be bf16, fp16 or fp32"));
}

// The geometry in the config.json of a Hugging Face checkpoint.
absl::StatusOr<ModelShape> ReadConfig(const std::string& path) {
  const absl::StatusOr<llm::Json> file = llm::ReadJsonFile(path);
  if (!file.ok()) {
    return absl::InvalidArgumentError(Concat("--model: ", AsStringView(file.status().message())));
  }
  // A model that also reads images describes its language model in an object of its own.
  const llm::JsonValue* const part = llm::Find(*file, "text_config");
  const llm::Json& config =
      part != nullptr && part->has_struct_value() ? part->struct_value() : *file;
  ModelShape model;
  const auto take = [&config](const std::string& key, std::uint64_t most,
                              std::uint32_t& into) -> absl::Status {
    const absl::StatusOr<std::uint64_t> count = llm::Count(config, key);
    if (!count.ok()) return count.status();
    if (*count == 0 || *count > most) {
      return absl::InvalidArgumentError(Concat(key, " is ", *count, "; it must be 1 to ", most));
    }
    into = static_cast<std::uint32_t>(*count);
    return absl::OkStatus();
  };
  absl::Status status = take("num_hidden_layers", kMostLayers, model.layers);
  kernels::LayerGeometry& geometry = model.geometry;
  if (status.ok()) status = take("num_attention_heads", kMostHeads, geometry.query_heads);
  geometry.kv_heads = geometry.query_heads;
  if (status.ok() && llm::Find(config, "num_key_value_heads") != nullptr) {
    status = take("num_key_value_heads", kMostHeads, geometry.kv_heads);
  }
  const llm::JsonValue* const head_dim = llm::Find(config, "head_dim");
  if (status.ok() && head_dim != nullptr && head_dim->has_number_value()) {
    status = take("head_dim", kMostHeads, geometry.head_dim);
  } else if (status.ok()) {
    std::uint32_t hidden = 0;
    status = take("hidden_size", 1u << 24, hidden);
    geometry.head_dim = hidden / geometry.query_heads;
  }
  if (!status.ok()) {
    return absl::InvalidArgumentError(
        Concat("--model: ", path, ": ", AsStringView(status.message())));
  }
  for (const char* key : {"torch_dtype", "dtype"}) {
    const llm::JsonValue* const type = llm::Find(config, key);
    if (type == nullptr || !type->has_string_value()) continue;
    const absl::StatusOr<kernels::ElementType> known = TypeNamed(type->string_value());
    if (known.ok()) geometry.type = *known;
  }
  return model;
}

absl::StatusOr<ModelShape> ModelOf(const Flags& flags) {
  ModelShape model;
  if (flags.Has("model")) {
    absl::StatusOr<ModelShape> read = ReadConfig(flags.Get("model"));
    if (!read.ok()) return read.status();
    model = *read;
  }
  struct Field {
    const char* flag;
    std::uint64_t most;
    std::uint32_t& into;
  };
  for (const Field& field : {Field{"layers", kMostLayers, model.layers},
                             Field{"query-heads", kMostHeads, model.geometry.query_heads},
                             Field{"kv-heads", kMostHeads, model.geometry.kv_heads},
                             Field{"head-dim", kMostHeads, model.geometry.head_dim}}) {
    if (!flags.Has(field.flag)) continue;
    const absl::StatusOr<std::uint64_t> number = flags.Number(field.flag, 1, field.most);
    if (!number.ok()) return number.status();
    field.into = static_cast<std::uint32_t>(*number);
  }
  if (flags.Has("type")) {
    const absl::StatusOr<kernels::ElementType> type = TypeNamed(flags.Get("type"));
    if (!type.ok()) {
      return absl::InvalidArgumentError(Concat("--type: ", AsStringView(type.status().message())));
    }
    model.geometry.type = *type;
  }
  kernels::LayerGeometry& geometry = model.geometry;
  if (geometry.query_heads % geometry.kv_heads != 0) {
    return absl::InvalidArgumentError(Concat("--query-heads ", geometry.query_heads,
                                             " is not a multiple of --kv-heads ",
                                             geometry.kv_heads));
  }
  geometry.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(geometry.head_dim)));
  model.delimiters = flags.Has("delimiters");
  return model;
}

std::string Between(const Range& range) {
  return range.least == range.most ? Concat(range.most) : Concat(range.least, " to ", range.most);
}

std::string BytesBetween(const Range& range) {
  if (range.least == range.most) return FormatBytes(range.most);
  return Concat(FormatBytes(range.least), " to ", FormatBytes(range.most));
}

std::string PercentOf(std::uint64_t part, std::uint64_t whole) {
  return whole == 0 ? "-" : Fixed(100 * static_cast<double>(part) / static_cast<double>(whole), 1);
}

std::string TextOf(const PolicyEstimate& estimate, const ModelShape& model) {
  constexpr std::size_t kColumns = 80;
  const kernels::LayerGeometry& geometry = model.geometry;
  std::string text =
      Concat("policy      ", estimate.policy, "\n", "model       ", model.layers, " layers, ",
             geometry.query_heads, " query heads, ", geometry.kv_heads, " kv heads, head_dim ",
             geometry.head_dim, ", ", NameOf(geometry.type), "\n", "prompt      ", estimate.tokens,
             " tokens; dense: ", FormatBytes(estimate.dense_bytes), ", ",
             FormatBytes(estimate.dense_bytes / estimate.tokens), " per token\n");
  Append(text, "keeps       ", Between(estimate.kept), " entries per lane");
  if (estimate.packed != 0) Append(text, ", ", estimate.packed, " of them packed");
  std::string percent = PercentOf(estimate.bytes.least, estimate.dense_bytes);
  const std::string most = PercentOf(estimate.bytes.most, estimate.dense_bytes);
  if (percent != most) Append(percent, " to ", most);
  Append(text, "\nmemory      ", BytesBetween(estimate.bytes), ", ", percent, " % of dense\n");
  if (estimate.read != 0) {
    Append(text, "attention   reads ", estimate.read, " entries per lane in a decode step\n");
  }
  Append(text, "observes    ", estimate.needs.empty() ? "nothing" : estimate.needs, "\n");
  for (const std::string& obstacle : estimate.obstacles) {
    const char* title = "note        ";
    for (const std::string& line : WrappedLines(obstacle, kColumns - 12)) {
      Append(text, std::exchange(title, "            "), line, "\n");
    }
  }
  return text;
}

std::string RangeJson(const char* name, const Range& range) {
  return Concat(",\"", name, "\":{\"least\":", range.least, ",\"most\":", range.most, "}");
}

std::string JsonOf(const PolicyEstimate& estimate, const ModelShape& model) {
  const kernels::LayerGeometry& geometry = model.geometry;
  std::string notes;
  for (const std::string& obstacle : estimate.obstacles) {
    Append(notes, notes.empty() ? "" : ",", JsonString(obstacle));
  }
  return Concat("{\"policy\":", JsonString(estimate.policy), ",\"layers\":", model.layers,
                ",\"query_heads\":", geometry.query_heads, ",\"kv_heads\":", geometry.kv_heads,
                ",\"head_dim\":", geometry.head_dim, ",\"type\":\"", NameOf(geometry.type),
                "\",\"tokens\":", estimate.tokens, ",\"dense_bytes\":", estimate.dense_bytes,
                RangeJson("bytes", estimate.bytes), RangeJson("kept_entries", estimate.kept),
                ",\"packed_entries\":", estimate.packed, ",\"read_entries\":", estimate.read,
                ",\"needs\":", JsonString(estimate.needs), ",\"notes\":[", notes, "]}\n");
}

absl::Status Explain(const Flags& flags) { return ExplainPolicy(flags.positional()[0], flags); }

}  // namespace

std::vector<Flags::Spec> ExplainFlags() {
  return {
      {"model", "FILE", "config.json of a Hugging Face checkpoint with the model's geometry.", ""},
      {"layers", "N", "Layers of the model. Unset: the file's, or 32.", ""},
      {"query-heads", "N", "Query heads of a layer. Unset: the file's, or 32.", ""},
      {"kv-heads", "N", "KV heads of a layer. Unset: the file's, or 8.", ""},
      {"head-dim", "N", "Channels of a head. Unset: the file's, or 128.", ""},
      {"type", "TYPE", "Type of the rows: bf16, fp16 or fp32. Unset: the file's, or bf16.", ""},
      {"delimiters", "", "The worker registers the model with delimiter token ids.", ""},
      {"tokens", "N", "Tokens of the prompt.", "8192"},
      {"json", "", "Print one JSON object.", ""}};
}

absl::Status ExplainPolicy(const std::string& text, const Flags& flags) {
  const absl::StatusOr<policies::Policy> policy = policies::ParsePolicy(text);
  if (!policy.ok()) return policy.status();
  const absl::StatusOr<ModelShape> model = ModelOf(flags);
  if (!model.ok()) return model.status();
  const absl::StatusOr<std::uint64_t> tokens = flags.Number("tokens", 1, kMostTokens);
  if (!tokens.ok()) return tokens.status();
  const absl::StatusOr<PolicyEstimate> estimate = EstimatePolicy(*policy, *model, *tokens);
  if (!estimate.ok()) return estimate.status();
  return Print(flags.Has("json") ? JsonOf(*estimate, *model) : TextOf(*estimate, *model));
}

CommandSpec ExplainSpec() {
  return {
      .name = "explain",
      .summary = "check a policy, and say what it keeps of a prompt and what may stop it",
      .description =
          "Checks a policy for a model and computes what it makes of a prompt: entries, bytes,\n"
          "what the worker must observe, and what may keep it from compressing. It looks at no\n"
          "keys: where they decide, it gives a range. No daemon is needed.\n",
      .arguments = {{.name = "POLICY", .hint = "'tessera policies' lists policy terms"}},
      .examples = {"tessera explain chunkkv:budget=0.3+mosaickv --tokens=4000",
                   "tessera explain mosaickv:keep=0.25 --model=config.json --json"},
      .flags = ExplainFlags(),
      .connects = Connects::kNowhere};
}

int RunExplain(std::span<const std::string_view> args) {
  return RunCommand(ExplainSpec(), args, Explain);
}

}  // namespace tessera::cli
