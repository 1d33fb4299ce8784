#include "client/model/checkpoint/vocab.h"

#include <algorithm>

#include "absl/status/status.h"
#include "client/model/checkpoint/json.h"
#include "daemon/base/strings.h"
#include "tessera/delimiters.h"

namespace tessera::llm {

namespace {

constexpr std::uint64_t kMaxToken = 1 << 20;

absl::StatusOr<TokenId> TokenOf(const JsonValue& value, std::string_view word) {
  const absl::StatusOr<std::uint64_t> id = CountOf(value, word);
  if (!id.ok()) return id.status();
  if (*id > kMaxToken) {
    return absl::InvalidArgumentError(
        Concat(Quoted(word), " has the token id ", *id, "; the limit is ", kMaxToken));
  }
  return static_cast<TokenId>(*id);
}

}  // namespace

absl::StatusOr<Vocab> Vocab::Read(const std::string& path) {
  const absl::StatusOr<Json> json = ReadJsonFile(path);
  if (!json.ok()) return json.status();
  const JsonValue* const words = llm::Find(*json, "vocab");
  if (words == nullptr || !words->has_struct_value()) {
    return absl::InvalidArgumentError(Concat("\"", path, "\" has no object \"vocab\""));
  }
  Vocab vocab;
  for (const auto& [word, value] : words->struct_value().fields()) {
    const absl::StatusOr<TokenId> id = TokenOf(value, word);
    if (!id.ok()) return id.status();
    vocab.ids_[word] = *id;
    if (!vocab.words_.emplace(*id, word).second) {
      return absl::InvalidArgumentError(
          Concat("\"", path, "\": ", Quoted(word), " and another word have the token id ", *id));
    }
  }
  if (const JsonValue* const ends = llm::Find(*json, "delimiters"); ends != nullptr) {
    for (const auto& [word, value] : ends->struct_value().fields()) {
      const absl::StatusOr<TokenId> id = TokenOf(value, word);
      if (!id.ok()) return id.status();
      vocab.delimiters_.push_back(*id);
    }
  } else {
    for (const auto& [word, id] : vocab.ids_) {
      if (client::IsDelimiter(word)) vocab.delimiters_.push_back(id);
    }
  }
  std::sort(vocab.delimiters_.begin(), vocab.delimiters_.end());
  return vocab;
}

absl::StatusOr<TokenId> Vocab::Find(const std::string& word) const {
  const auto it = ids_.find(word);
  if (it == ids_.end()) {
    return absl::NotFoundError(Concat("the vocabulary has no word ", Quoted(word)));
  }
  return it->second;
}

absl::StatusOr<std::vector<TokenId>> Vocab::Encode(std::string_view text) const {
  std::vector<TokenId> tokens;
  while (true) {
    text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
    if (text.empty()) return tokens;
    const std::size_t end = std::min(text.find(' '), text.size());
    const absl::StatusOr<TokenId> token = Find(std::string(text.substr(0, end)));
    if (!token.ok()) return token.status();
    tokens.push_back(*token);
    text.remove_prefix(end);
  }
}

std::string Vocab::Decode(std::span<const TokenId> tokens) const {
  std::string text;
  for (const TokenId token : tokens) {
    if (!text.empty()) text += ' ';
    const auto it = words_.find(token);
    if (it == words_.end()) {
      Append(text, "<", token, ">");
    } else {
      text += it->second;
    }
  }
  return text;
}

}  // namespace tessera::llm
