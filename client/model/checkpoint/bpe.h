// A byte-level byte-pair tokenizer, as GPT-2, SmolLM2 and Qwen2 use.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "client/model/checkpoint/tokenizer.h"
#include "client/model/checkpoint/word_split.h"

namespace tessera::llm {

class Bpe final : public Tokenizer {
 public:
  struct Parts {
    // By id. Texts are in GPT-2's alphabet, where each byte is a printable character; those of
    // control tokens are not.
    std::vector<std::string> tokens;
    std::vector<bool> is_control;  // by id
    // Pairs of token texts, most urgent first.
    std::vector<std::pair<std::string, std::string>> merges;
    WordSplit split = WordSplit::kGpt2;
    std::optional<TokenId> unknown;  // for bytes without a token of their own
    std::optional<TokenId> stop;
    // Jinja text. Only ChatML is understood; without it, prompts are plain text.
    std::string chat_template;
  };
  // INVALID_ARGUMENT if a text occurs twice, or a merge names or gives a text that is no token.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Create(Parts parts);

  absl::StatusOr<std::vector<TokenId>> Encode(std::string_view text) const override;
  std::string Decode(std::span<const TokenId> tokens) const override;
  absl::StatusOr<std::vector<TokenId>> Prompt(std::string_view message) const override;
  std::optional<TokenId> stop() const override { return stop_; }
  const std::vector<TokenId>& delimiters() const override { return delimiters_; }

 private:
  struct Merge {
    std::uint32_t rank;
    TokenId token;
  };
  struct ChatMl {
    TokenId begin, end;  // <|im_start|>, <|im_end|>
    std::string system;  // the system message that the template adds; empty: none
  };
  Bpe() = default;
  absl::Status ReadTokens(const Parts& parts);
  absl::Status ReadMerges(const Parts& parts);
  void ReadChat(const Parts& parts);
  absl::Status EncodeWord(std::string_view word, std::vector<TokenId>& tokens) const;
  void MergeSymbols(std::vector<TokenId> symbols, std::vector<TokenId>& tokens) const;
  const Merge* FindMerge(TokenId left, TokenId right) const;
  absl::Status AddMessage(std::string_view role, std::string_view text,
                          std::vector<TokenId>& tokens) const;

  WordSplit split_ = WordSplit::kGpt2;
  std::vector<std::string> texts_;                     // by id, as bytes
  std::array<std::optional<TokenId>, 256> of_byte_{};  // tokens of single bytes
  std::unordered_map<std::uint64_t, Merge> merges_;    // by left id << 32 | right id
  std::optional<TokenId> unknown_, stop_;
  std::optional<ChatMl> chat_;
  std::unordered_map<std::string, TokenId> ids_;  // by text in GPT-2's alphabet
  std::vector<TokenId> delimiters_;
};

}  // namespace tessera::llm
