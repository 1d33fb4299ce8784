// Text to tokens and back, whatever the kind of vocabulary.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace tessera::llm {

using TokenId = std::uint32_t;

// Immutable: any thread may call it.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  // INVALID_ARGUMENT or NOT_FOUND names what the vocabulary cannot express. Nothing in the text
  // becomes a control token.
  virtual absl::StatusOr<std::vector<TokenId>> Encode(std::string_view text) const = 0;
  virtual std::string Decode(std::span<const TokenId> tokens) const = 0;

  // A user's message as the model was trained to read it, up to where its answer begins.
  virtual absl::StatusOr<std::vector<TokenId>> Prompt(std::string_view message) const = 0;
  // The token that ends an answer. nullopt: answers do not end by themselves.
  virtual std::optional<TokenId> stop() const = 0;
  // Tokens that end sentences, ascending.
  virtual const std::vector<TokenId>& delimiters() const = 0;
};

// Reads the tokenizer of a model: of a GGUF file, or of a folder with tokenizer.json or vocab.json.
absl::StatusOr<std::unique_ptr<Tokenizer>> ReadTokenizer(const std::string& path);

}  // namespace tessera::llm
