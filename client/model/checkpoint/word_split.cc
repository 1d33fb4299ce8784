#include "client/model/checkpoint/word_split.h"

#include <algorithm>
#include <cctype>

#include "client/model/checkpoint/unicode.h"

namespace tessera::llm {

namespace {

bool IsOther(char32_t code) { return !IsSpace(code) && !IsLetter(code) && !IsNumber(code); }
bool IsLineEnd(char32_t code) { return code == '\r' || code == '\n'; }

// Bytes of the longest run of characters of a class, from `at`.
template <typename Class>
std::size_t RunAt(std::string_view text, std::size_t at, const Class& is_in) {
  std::size_t end = at;
  while (end < text.size()) {
    const Character next = FirstCharacter(text.substr(end));
    if (!is_in(next.code)) break;
    end += next.bytes;
  }
  return end - at;
}

// Bytes of 's, 't, 're, 've, 'm, 'll or 'd at the start; 0: there is none.
std::size_t Contraction(std::string_view text, bool any_case) {
  for (const std::string_view end : {"s", "t", "re", "ve", "m", "ll", "d"}) {
    if (text.size() <= end.size() || text[0] != '\'') continue;
    const bool same = std::equal(end.begin(), end.end(), text.begin() + 1, [&](char a, char b) {
      return a == b || (any_case && a == std::tolower(static_cast<unsigned char>(b)));
    });
    if (same) return end.size() + 1;
  }
  return 0;
}

// \s+(?!\S)|\s+ : all blanks, but the last one belongs to the word that follows.
std::size_t Blanks(std::string_view text) {
  const std::size_t run = RunAt(text, 0, IsSpace);
  if (run == text.size()) return run;
  std::size_t last = 0;  // where the last blank starts
  for (std::size_t at = 0; at < run; at += FirstCharacter(text.substr(at)).bytes) last = at;
  return last > 0 ? last : run;
}

std::size_t Gpt2Word(std::string_view text) {
  if (const std::size_t bytes = Contraction(text, false)) return bytes;
  const std::size_t blank = text[0] == ' ' ? 1 : 0;
  for (const auto is_in : {IsLetter, IsNumber, IsOther}) {
    if (const std::size_t run = RunAt(text, blank, is_in)) return blank + run;
  }
  return Blanks(text);
}

// \s*[\r\n]+ : blanks up to the last line end among them; 0: there is none.
std::size_t LineEnds(std::string_view text) {
  const std::string_view run = text.substr(0, RunAt(text, 0, IsSpace));
  const std::size_t last = run.find_last_of("\r\n");
  return last == std::string_view::npos ? 0 : last + 1;
}

std::size_t Qwen2Word(std::string_view text) {
  if (const std::size_t bytes = Contraction(text, true)) return bytes;
  const Character first = FirstCharacter(text);
  if (IsNumber(first.code)) return first.bytes;
  if (IsLetter(first.code)) return RunAt(text, 0, IsLetter);
  if (!IsLineEnd(first.code)) {
    if (const std::size_t run = RunAt(text, first.bytes, IsLetter)) return first.bytes + run;
  }
  const std::size_t blank = text[0] == ' ' ? 1 : 0;
  if (const std::size_t run = RunAt(text, blank, IsOther)) {
    return blank + run + RunAt(text, blank + run, IsLineEnd);
  }
  if (const std::size_t bytes = LineEnds(text)) return bytes;
  return Blanks(text);
}

template <typename Word>
void Split(std::string_view text, const Word& word, std::vector<std::string_view>& words) {
  while (!text.empty()) {
    const std::size_t bytes = word(text);
    words.push_back(text.substr(0, bytes));
    text.remove_prefix(bytes);
  }
}

}  // namespace

std::vector<std::string_view> SplitWords(WordSplit split, std::string_view text) {
  std::vector<std::string_view> words;
  if (split == WordSplit::kQwen2) {
    Split(text, Qwen2Word, words);
    return words;
  }
  if (split == WordSplit::kGpt2) {
    Split(text, Gpt2Word, words);
    return words;
  }
  while (!text.empty()) {
    const std::size_t run = RunAt(text, 0, [](char32_t code) { return !IsNumber(code); });
    Split(text.substr(0, run), Gpt2Word, words);
    text.remove_prefix(run);
    if (text.empty()) break;
    const std::size_t bytes = FirstCharacter(text).bytes;
    words.push_back(text.substr(0, bytes));
    text.remove_prefix(bytes);
  }
  return words;
}

}  // namespace tessera::llm
