// Words and their numbers: a word-level vocabulary, text being words between spaces.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"

namespace tessera::llm {

using TokenId = std::uint32_t;

class Vocab {
 public:
  // A JSON object with `vocab` (word to number) and `delimiters`, likewise; without them those are
  // the words that look like it (client::IsDelimiter).
  static absl::StatusOr<Vocab> Read(const std::string& path);

  // NOT_FOUND names the word.
  absl::StatusOr<TokenId> Find(const std::string& word) const;
  absl::StatusOr<std::vector<TokenId>> Encode(std::string_view text) const;
  // Numbers that are no word's come out as "<17>".
  std::string Decode(std::span<const TokenId> tokens) const;

  const std::vector<TokenId>& delimiters() const { return delimiters_; }

 private:
  std::unordered_map<std::string, TokenId> ids_;
  std::unordered_map<TokenId, std::string> words_;
  std::vector<TokenId> delimiters_;  // ascending
};

}  // namespace tessera::llm
