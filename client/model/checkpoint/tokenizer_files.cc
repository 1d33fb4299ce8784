// ReadTokenizer: finds a tokenizer's parts in a GGUF file or in tokenizer.json.

#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "client/model/checkpoint/bpe.h"
#include "client/model/checkpoint/gguf.h"
#include "client/model/checkpoint/json.h"
#include "client/model/checkpoint/vocab.h"
#include "daemon/base/strings.h"

namespace tessera::llm {

namespace {

constexpr std::string_view kQwen2Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|)"
    R"(\s*[\r\n]+|\s+(?!\S)|\s+)";

// GGUF's tokenizer.ggml.token_type.
constexpr std::int64_t kControl = 3, kUserDefined = 4;

template <typename Item>
absl::StatusOr<std::vector<Item>> List(const Gguf& file, const std::string& key) {
  const Gguf::Value* const value = file.FindValue(key);
  const auto* const items = value == nullptr ? nullptr : std::get_if<std::vector<Item>>(value);
  if (items == nullptr) {
    return absl::InvalidArgumentError(Concat(Quoted(key), " is missing or not a list"));
  }
  return *items;
}

absl::StatusOr<std::optional<TokenId>> SpecialToken(const Gguf& file, const std::string& key) {
  if (file.FindValue(key) == nullptr) return std::nullopt;
  const absl::StatusOr<std::uint64_t> id = file.Count(key);
  if (!id.ok()) return id.status();
  if (*id > 0xFFFFFFFF) return absl::InvalidArgumentError(Concat(key, " is ", *id));
  return static_cast<TokenId>(*id);
}

// "left right": a token's text has no blank.
absl::Status AddMerge(std::string_view merge, Bpe::Parts& parts) {
  const std::size_t blank = merge.find(' ');
  if (blank == std::string_view::npos) {
    return absl::InvalidArgumentError(Concat("the merge ", Quoted(merge), " is not a pair"));
  }
  parts.merges.emplace_back(merge.substr(0, blank), merge.substr(blank + 1));
  return absl::OkStatus();
}

absl::Status SplitOf(const Gguf& file, Bpe::Parts& parts) {
  const absl::StatusOr<std::string_view> kind = file.Text("tokenizer.ggml.model");
  if (!kind.ok()) return kind.status();
  const std::string_view split = file.Text("tokenizer.ggml.pre").value_or("gpt-2");
  if (*kind == "gpt2" && (split == "gpt-2" || split == "default")) {
    parts.split = WordSplit::kGpt2;
  } else if (*kind == "gpt2" && split == "smollm") {
    parts.split = WordSplit::kSmolLm;
  } else if (*kind == "gpt2" && split == "qwen2") {
    parts.split = WordSplit::kQwen2;
  } else {
    return absl::UnimplementedError(Concat("tokenizer ", Quoted(*kind), " with ", Quoted(split),
                                           "; supported is gpt2 with gpt-2, smollm or qwen2"));
  }
  return absl::OkStatus();
}

absl::StatusOr<Bpe::Parts> PartsOf(const Gguf& file) {
  Bpe::Parts parts;
  if (absl::Status status = SplitOf(file, parts); !status.ok()) return status;
  const auto tokens = List<std::string_view>(file, "tokenizer.ggml.tokens");
  if (!tokens.ok()) return tokens.status();
  const auto types = List<std::int64_t>(file, "tokenizer.ggml.token_type");
  if (!types.ok()) return types.status();
  const auto merges = List<std::string_view>(file, "tokenizer.ggml.merges");
  if (!merges.ok()) return merges.status();
  parts.tokens.assign(tokens->begin(), tokens->end());
  for (const std::int64_t type : *types) {
    parts.is_control.push_back(type == kControl || type == kUserDefined);
  }
  for (const std::string_view merge : *merges) {
    if (absl::Status status = AddMerge(merge, parts); !status.ok()) return status;
  }
  const struct {
    const char* key;
    std::optional<TokenId>& token;
  } specials[] = {{"tokenizer.ggml.unknown_token_id", parts.unknown},
                  {"tokenizer.ggml.eos_token_id", parts.stop}};
  for (const auto& [key, token] : specials) {
    const absl::StatusOr<std::optional<TokenId>> found = SpecialToken(file, key);
    if (!found.ok()) return found.status();
    token = *found;
  }
  parts.chat_template = std::string(file.Text("tokenizer.chat_template").value_or(""));
  return parts;
}

// ---- tokenizer.json ----------------------------------------------------------------------------

std::string TextOf(const Json& json, const std::string& key) {
  const JsonValue* const value = Find(json, key);
  return value == nullptr ? "" : value->string_value();
}

// The steps of a pre-tokenizer as one text: "Digits,ByteLevel".
std::string StepsOf(const Json& pre) {
  if (TextOf(pre, "type") != "Sequence") return TextOf(pre, "type");
  std::string steps;
  const JsonValue* const list = Find(pre, "pretokenizers");
  for (int i = 0; list != nullptr && i < list->list_value().values_size(); ++i) {
    const Json& step = list->list_value().values(i).struct_value();
    std::string name = TextOf(step, "type");
    if (name == "Split") {
      const JsonValue* const pattern = Find(step, "pattern");
      const std::string regex = pattern == nullptr ? "" : TextOf(pattern->struct_value(), "Regex");
      name = regex == kQwen2Pattern ? "Qwen2" : Concat("Split ", Quoted(regex));
    }
    Append(steps, steps.empty() ? "" : ",", name);
  }
  return steps;
}

absl::Status SplitOf(const Json& json, Bpe::Parts& parts) {
  const JsonValue* const pre = Find(json, "pre_tokenizer");
  const std::string steps = pre == nullptr ? "" : StepsOf(pre->struct_value());
  if (steps == "ByteLevel") {
    parts.split = WordSplit::kGpt2;
  } else if (steps == "Digits,ByteLevel") {
    parts.split = WordSplit::kSmolLm;
  } else if (steps == "Qwen2,ByteLevel") {
    parts.split = WordSplit::kQwen2;
  } else {
    return absl::UnimplementedError(Concat(
        "pre_tokenizer ", Quoted(steps),
        "; supported are those of GPT-2, SmolLM2 and Qwen2 (ByteLevel; Digits and ByteLevel; "
        "Split and ByteLevel)"));
  }
  return absl::OkStatus();
}

absl::Status SetToken(const std::string& text, const absl::StatusOr<std::uint64_t>& id,
                      bool is_control, Bpe::Parts& parts) {
  if (!id.ok()) return id.status();
  if (*id >= 1 << 20) {
    return absl::InvalidArgumentError(
        Concat(Quoted(text), " has the token id ", *id, "; the limit is ", 1 << 20));
  }
  if (*id >= parts.tokens.size()) {
    parts.tokens.resize(*id + 1);
    parts.is_control.resize(*id + 1);
  }
  if (!parts.tokens[*id].empty() && parts.tokens[*id] != text) {
    return absl::InvalidArgumentError(
        Concat(Quoted(text), " and ", Quoted(parts.tokens[*id]), " have the token id ", *id));
  }
  parts.tokens[*id] = text;
  parts.is_control[*id] = is_control;
  return absl::OkStatus();
}

absl::Status MergesOf(const JsonValue& list, Bpe::Parts& parts) {
  for (const JsonValue& merge : list.list_value().values()) {
    absl::Status status;
    if (merge.has_list_value() && merge.list_value().values_size() == 2) {
      parts.merges.emplace_back(merge.list_value().values(0).string_value(),
                                merge.list_value().values(1).string_value());
    } else {
      status = AddMerge(merge.string_value(), parts);
    }
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<Bpe::Parts> PartsOf(const Json& json) {
  Bpe::Parts parts;
  if (absl::Status status = SplitOf(json, parts); !status.ok()) return status;
  const JsonValue* const model = Find(json, "model");
  const JsonValue* const vocab = model == nullptr ? nullptr : Find(model->struct_value(), "vocab");
  const JsonValue* const merges =
      model == nullptr ? nullptr : Find(model->struct_value(), "merges");
  if (vocab == nullptr || merges == nullptr) {
    return absl::InvalidArgumentError("\"model\" has no \"vocab\" or no \"merges\"");
  }
  for (const auto& [text, id] : vocab->struct_value().fields()) {
    const absl::Status status = SetToken(text, CountOf(id, text), false, parts);
    if (!status.ok()) return status;
  }
  if (const JsonValue* const added = Find(json, "added_tokens")) {
    for (const JsonValue& token : added->list_value().values()) {
      const Json& entry = token.struct_value();
      const absl::Status status =
          SetToken(TextOf(entry, "content"), llm::Count(entry, "id"), true, parts);
      if (!status.ok()) return status;
    }
  }
  // Ids without a text get one that no text encodes to.
  for (std::size_t id = 0; id < parts.tokens.size(); ++id) {
    if (parts.tokens[id].empty()) {
      parts.tokens[id] = Concat("<unused ", id, ">");
      parts.is_control[id] = true;
    }
  }
  if (absl::Status status = MergesOf(*merges, parts); !status.ok()) return status;
  return parts;
}

absl::StatusOr<std::unique_ptr<Tokenizer>> Named(const std::string& path,
                                                 absl::StatusOr<Bpe::Parts> parts) {
  if (parts.ok()) {
    absl::StatusOr<std::unique_ptr<Tokenizer>> bpe = Bpe::Create(*std::move(parts));
    if (bpe.ok()) return bpe;
    parts = bpe.status();
  }
  return absl::Status(parts.status().code(), Concat("\"", path, "\": ", parts.status().message()));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> ReadTokenizer(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_directory(path, error)) {
    const absl::StatusOr<Gguf> file = Gguf::Open(path);
    if (!file.ok()) return file.status();
    return Named(path, PartsOf(*file));
  }
  const std::string name = path + "/tokenizer.json";
  if (!std::filesystem::exists(name, error)) {
    absl::StatusOr<Vocab> vocab = Vocab::Read(path + "/vocab.json");
    if (!vocab.ok()) return vocab.status();
    return std::make_unique<Vocab>(*std::move(vocab));
  }
  const absl::StatusOr<Json> json = ReadJsonFile(name);
  if (!json.ok()) return json.status();
  absl::StatusOr<Bpe::Parts> parts = PartsOf(*json);
  // The template is beside it. Without one, prompts are plain text.
  const absl::StatusOr<Json> config = ReadJsonFile(path + "/tokenizer_config.json");
  if (parts.ok() && config.ok()) parts->chat_template = TextOf(*config, "chat_template");
  return Named(name, std::move(parts));
}

}  // namespace tessera::llm
