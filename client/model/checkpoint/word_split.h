// Splits text into the words that byte-pair encoding works on, as the tokenizers of model families
// do with a regular expression each.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace tessera::llm {

enum class WordSplit : std::uint8_t {
  // 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
  kGpt2,
  // Every number character alone; the text between them as kGpt2.
  kSmolLm,
  // (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|
  // \s*[\r\n]+|\s+(?!\S)|\s+
  kQwen2,
};

// The words in order; together they are the text.
std::vector<std::string_view> SplitWords(WordSplit split, std::string_view text);

}  // namespace tessera::llm
