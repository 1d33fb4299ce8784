// A word-level vocabulary: text is words separated by spaces.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "client/model/checkpoint/tokenizer.h"

namespace tessera::llm {

class Vocab final : public Tokenizer {
 public:
  // Reads a JSON object with `vocab` (word to token id) and `delimiters` (the same form). Without
  // `delimiters`, every word that client::IsDelimiter accepts is one.
  static absl::StatusOr<Vocab> Read(const std::string& path);

  // NOT_FOUND names the word.
  absl::StatusOr<TokenId> Find(const std::string& word) const;
  absl::StatusOr<std::vector<TokenId>> Encode(std::string_view text) const override;
  // Token ids without a word are written as "<17>".
  std::string Decode(std::span<const TokenId> tokens) const override;
  // The message after "<bos>".
  absl::StatusOr<std::vector<TokenId>> Prompt(std::string_view message) const override {
    return Encode("<bos> " + std::string(message));
  }
  std::optional<TokenId> stop() const override { return std::nullopt; }

  const std::vector<TokenId>& delimiters() const override { return delimiters_; }

 private:
  std::unordered_map<std::string, TokenId> ids_;
  std::unordered_map<TokenId, std::string> words_;
  std::vector<TokenId> delimiters_;  // ascending
};

}  // namespace tessera::llm
