// tessera generate: continues a text with a model whose KV cache is in a daemon.

#include "client/model/generate.h"

#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/cli/command.h"
#include "client/cli/eval/model_path.h"
#include "client/model/shared_prompt.h"
#include "client/tools/connection.h"
#include "client/tools/local_daemon.h"
#include "client/tools/output.h"
#include "client/tools/run_command.h"
#include "daemon/base/strings.h"

namespace tessera::cli {

namespace {

absl::StatusOr<llm::GenerateOptions> OptionsOf(const Flags& flags) {
  constexpr std::uint64_t kAnySeed = std::numeric_limits<std::uint64_t>::max();
  const absl::StatusOr<std::uint64_t> tokens = flags.Number("tokens", 1, 100000);
  if (!tokens.ok()) return tokens.status();
  const absl::StatusOr<std::uint64_t> top_k = flags.Number("top-k", 0, 1 << 20);
  if (!top_k.ok()) return top_k.status();
  const absl::StatusOr<std::uint64_t> seed = flags.Number("seed", 0, kAnySeed);
  if (!seed.ok()) return seed.status();
  const std::string& text = flags.Get("temperature");
  char* end = nullptr;
  const double temperature = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !(temperature >= 0 && temperature <= 100)) {
    return absl::InvalidArgumentError(
        Concat("--temperature is \"", text, "\"; it must be a number from 0 to 100"));
  }
  return llm::GenerateOptions{
      .max_tokens = static_cast<std::uint32_t>(*tokens),
      .sampler = {
          .temperature = temperature, .top_k = static_cast<std::uint32_t>(*top_k), .seed = *seed}};
}

struct Prompt {
  std::vector<llm::TokenId> tokens;
  std::uint64_t head = 0;  // tokens of the shared prefix; 0: nothing is shared
};

absl::StatusOr<llm::StartedPrompt> Start(const llm::Model& model, client::Worker& worker,
                                         const client::Model& registered, const std::string& policy,
                                         const Prompt& prompt) {
  if (prompt.head > 0) {
    absl::StatusOr<llm::StartedPrompt> started =
        llm::PrefillShared(model, worker, registered,
                           {.tokens = prompt.tokens, .head = prompt.head, .policy = policy});
    if (started.ok()) {
      std::fprintf(stderr, "first %llu of %zu tokens: %s\n",
                   static_cast<unsigned long long>(prompt.head), prompt.tokens.size(),
                   started->found ? "found" : "computed and published");
    }
    return started;
  }
  absl::StatusOr<client::Sequence> sequence = worker.CreateSequence(registered, policy);
  if (!sequence.ok()) return sequence.status();
  absl::StatusOr<std::vector<float>> logits = llm::Prefill(model, prompt.tokens, *sequence);
  if (!logits.ok()) return logits.status();
  return llm::StartedPrompt{*std::move(sequence), *std::move(logits)};
}

absl::StatusOr<std::vector<llm::TokenId>> GoOn(const llm::Model& model,
                                               const llm::Tokenizer& tokenizer, const Flags& flags,
                                               const Door& door, const Prompt& prompt,
                                               const llm::GenerateOptions& options) {
  absl::StatusOr<std::unique_ptr<client::Worker>> worker =
      client::Worker::Attach({.address = door.address,
                              .device = door.device,
                              .tls = door.tls,
                              .tenant_token = door.token,
                              .worker_name = "generate"});
  if (!worker.ok()) return worker.status();
  const absl::StatusOr<client::Model> registered =
      (*worker)->RegisterModel(llm::GeometryOf(model.config(), "generate", tokenizer.delimiters()));
  if (!registered.ok()) return registered.status();
  absl::StatusOr<llm::StartedPrompt> started =
      Start(model, **worker, *registered, flags.Get("policy"), prompt);
  if (!started.ok()) return started.status();
  client::Sequence* const batch[] = {&started->sequence};
  absl::StatusOr<std::vector<std::vector<llm::TokenId>>> answers =
      llm::Generate(model, **worker, batch, std::move(started->logits), options);
  if (!answers.ok()) return answers.status();
  return std::move((*answers)[0]);
}

// The text to continue: TEXT, or --prompt.
absl::StatusOr<std::string> TextOf(const Flags& flags) {
  const bool has_argument = !flags.positional().empty();
  if (has_argument == flags.Has("prompt")) {
    return absl::InvalidArgumentError("give the text either as TEXT or as --prompt");
  }
  return has_argument ? flags.positional()[0] : flags.Get("prompt");
}

absl::Status Generate(const Flags& flags) {
  if (flags.Get("model").empty()) {
    return absl::InvalidArgumentError("--model=NAME or --model=PATH is required");
  }
  const absl::StatusOr<std::string> text = TextOf(flags);
  if (!text.ok()) return text.status();
  const absl::StatusOr<std::string> path = FindModel(flags.Get("model"));
  if (!path.ok()) return path.status();
  absl::StatusOr<llm::GenerateOptions> options = OptionsOf(flags);
  if (!options.ok()) return options.status();
  const absl::StatusOr<std::unique_ptr<llm::Tokenizer>> tokenizer = llm::ReadTokenizer(*path);
  if (!tokenizer.ok()) return tokenizer.status();
  options->stop = (*tokenizer)->stop();
  absl::StatusOr<std::vector<llm::TokenId>> tokens =
      flags.Has("raw") ? (*tokenizer)->Encode(*text) : (*tokenizer)->Prompt(*text);
  if (!tokens.ok()) return tokens.status();
  if (tokens->empty()) return absl::InvalidArgumentError("the text is empty");
  const absl::StatusOr<std::uint64_t> shared = flags.Number("share", 0, tokens->size() - 1);
  if (!shared.ok()) return shared.status();
  const Prompt prompt = {.tokens = *std::move(tokens), .head = *shared};
  const absl::StatusOr<std::unique_ptr<llm::Model>> model = llm::Model::Load(*path);
  if (!model.ok()) return model.status();
  std::unique_ptr<bench::LocalDaemon> own;
  Door door = ConnectionOf(flags);
  if (door.address.empty()) {
    if (absl::Status status = CheckNoDevice(door); !status.ok()) return status;
    absl::StatusOr<std::unique_ptr<bench::LocalDaemon>> daemon = bench::LocalDaemon::Start({});
    if (!daemon.ok()) return daemon.status();
    own = *std::move(daemon);
    door = {.address = own->address(), .tls = std::nullopt, .token = ""};
  }
  absl::StatusOr<std::vector<llm::TokenId>> answer =
      GoOn(**model, **tokenizer, flags, door, prompt, *options);
  if (!answer.ok()) return answer.status();
  if (!answer->empty() && options->stop == answer->back()) answer->pop_back();
  return Print((*tokenizer)->Decode(*answer) + "\n");
}

}  // namespace

CommandSpec GenerateSpec() {
  return {
      .name = "generate",
      .summary = "continue a text with a model",
      .description =
          "Continues a text with a model whose KV cache is in the daemon. A chat model reads the\n"
          "text as a user's message and answers it. Every word of a text for the recall model\n"
          "must be in its vocabulary.\n",
      .arguments = {{.name = "TEXT", .hint = "put it in quotes", .required = false}},
      .examples = {"tessera generate --model=smollm2 --policy=mosaickv --tokens=64 \\\n"
                   "      --prompt='What is a mosaic?'",
                   "tessera generate --model=tests/golden/recall --policy=mosaickv \\\n"
                   "      'what is the special number for lobster ? answer :'"},
      .flags = {{"model", "NAME|PATH",
                 "A model that deploy/models/fetch has fetched, a GGUF file, or a folder with "
                 "config.json, model.safetensors and tokenizer.json or vocab.json. Required.",
                 ""},
                {"prompt", "TEXT", "The text, instead of the argument.", ""},
                {"raw", "", "Continue the text as it is, without the model's chat template.", ""},
                {"policy", "POLICY", "Policy of the sequence.", "dense"},
                {"share", "N",
                 "Share the first N tokens (<bos> counts as one): match a published prefix, or "
                 "publish it.",
                 "0"},
                {"tokens", "N", "Tokens to generate.", "16"},
                {"temperature", "T", "Sampling temperature. 0: always the likeliest token.", "0"},
                {"top-k", "N", "Sample among the N likeliest tokens. 0: among all.", "0"},
                {"seed", "N", "Seed of the sampler.", "0"}},
      .connects = Connects::kToOwnOrDaemon,
      .attaches = true};
}

int RunGenerate(std::span<const std::string_view> args) {
  return RunCommand(GenerateSpec(), args, Generate);
}

}  // namespace tessera::cli
