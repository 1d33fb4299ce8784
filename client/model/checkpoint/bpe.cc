#include "client/model/checkpoint/bpe.h"

#include <algorithm>
#include <queue>

#include "absl/status/status.h"
#include "client/model/checkpoint/unicode.h"
#include "daemon/base/strings.h"
#include "tessera/delimiters.h"

namespace tessera::llm {

namespace {

constexpr std::size_t kMaxTokens = 1 << 20;

// GPT-2's alphabet: printable bytes are themselves, the others are U+0100 and following, in order.
struct Alphabet {
  std::array<char32_t, 256> character{};
  std::unordered_map<char32_t, std::uint8_t> byte;

  Alphabet() {
    char32_t next = 0x100;
    for (std::uint32_t b = 0; b < 256; ++b) {
      const bool printable =
          (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
      character[b] = printable ? b : next++;
      byte[character[b]] = static_cast<std::uint8_t>(b);
    }
  }
};

// The bytes of a token's text. Characters outside the alphabet stand for themselves.
std::string BytesOf(const Alphabet& alphabet, std::string_view text) {
  std::string bytes;
  while (!text.empty()) {
    const Character next = FirstCharacter(text);
    const auto it = alphabet.byte.find(next.code);
    if (it != alphabet.byte.end()) {
      bytes += static_cast<char>(it->second);
    } else {
      bytes += text.substr(0, next.bytes);
    }
    text.remove_prefix(next.bytes);
  }
  return bytes;
}

constexpr std::uint64_t KeyOf(TokenId left, TokenId right) {
  return std::uint64_t{left} << 32 | right;
}

constexpr std::string_view kBegin = "<|im_start|>", kEnd = "<|im_end|>";

// The text of a fixed system message in a ChatML template; empty: it has none. Line ends in the
// template are characters or "\n".
std::string SystemMessage(std::string_view chat_template) {
  const std::string head = Concat(kBegin, "system");
  for (std::size_t at = 0; (at = chat_template.find(head, at)) != std::string_view::npos;) {
    at += head.size();
    std::string_view text = chat_template.substr(at);
    text = text.substr(0, text.find(kEnd));
    if (text.starts_with("\n")) {
      text.remove_prefix(1);
    } else if (text.starts_with("\\n")) {
      text.remove_prefix(2);
    } else {
      continue;
    }
    if (text.find_first_of("{}'\\") == std::string_view::npos) return std::string(text);
  }
  return "";
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> Bpe::Create(Parts parts) {
  if (parts.tokens.empty() || parts.tokens.size() > kMaxTokens ||
      parts.is_control.size() != parts.tokens.size()) {
    return absl::InvalidArgumentError(Concat(parts.tokens.size(), " tokens with ",
                                             parts.is_control.size(), " types; the limit is ",
                                             kMaxTokens));
  }
  for (const std::optional<TokenId> special : {parts.unknown, parts.stop}) {
    if (special && *special >= parts.tokens.size()) {
      return absl::InvalidArgumentError(
          Concat("token ", *special, " of a vocabulary of ", parts.tokens.size()));
    }
  }
  std::unique_ptr<Bpe> bpe(new Bpe);
  bpe->split_ = parts.split;
  bpe->unknown_ = parts.unknown;
  bpe->stop_ = parts.stop;
  if (absl::Status status = bpe->ReadTokens(parts); !status.ok()) return status;
  if (absl::Status status = bpe->ReadMerges(parts); !status.ok()) return status;
  bpe->ReadChat(parts);
  return std::unique_ptr<Tokenizer>(std::move(bpe));
}

absl::Status Bpe::ReadTokens(const Parts& parts) {
  const Alphabet alphabet;
  for (TokenId id = 0; id < parts.tokens.size(); ++id) {
    const std::string& text = parts.tokens[id];
    if (!ids_.emplace(text, id).second) {
      return absl::InvalidArgumentError(Concat("two tokens have the text ", Quoted(text)));
    }
    texts_.push_back(parts.is_control[id] ? text : BytesOf(alphabet, text));
    if (!parts.is_control[id] && client::IsDelimiter(texts_[id])) delimiters_.push_back(id);
  }
  for (std::size_t b = 0; b < 256; ++b) {
    std::string text;
    AppendUtf8(alphabet.character[b], text);
    const auto it = ids_.find(text);
    if (it != ids_.end() && !parts.is_control[it->second]) of_byte_[b] = it->second;
  }
  return absl::OkStatus();
}

absl::Status Bpe::ReadMerges(const Parts& parts) {
  std::uint32_t rank = 0;
  for (const auto& [left, right] : parts.merges) {
    const auto left_id = ids_.find(left), right_id = ids_.find(right);
    const auto both = ids_.find(left + right);
    if (left_id == ids_.end() || right_id == ids_.end() || both == ids_.end()) {
      return absl::InvalidArgumentError(Concat("the merge of ", Quoted(left), " and ",
                                               Quoted(right),
                                               " needs three tokens that the vocabulary lacks"));
    }
    merges_.emplace(KeyOf(left_id->second, right_id->second), Merge{rank++, both->second});
  }
  return absl::OkStatus();
}

void Bpe::ReadChat(const Parts& parts) {
  const auto begin = ids_.find(std::string(kBegin)), end = ids_.find(std::string(kEnd));
  if (parts.chat_template.find(kBegin) == std::string::npos || begin == ids_.end() ||
      end == ids_.end()) {
    return;
  }
  chat_ = ChatMl{begin->second, end->second, SystemMessage(parts.chat_template)};
  stop_ = end->second;
}

const Bpe::Merge* Bpe::FindMerge(TokenId left, TokenId right) const {
  const auto it = merges_.find(KeyOf(left, right));
  return it == merges_.end() ? nullptr : &it->second;
}

// Repeatedly merges the most urgent pair of neighbours, the leftmost of equals. O(n log n): a word
// of untrusted text may be long.
void Bpe::MergeSymbols(std::vector<TokenId> symbols, std::vector<TokenId>& tokens) const {
  constexpr std::uint32_t kNone = ~0u;
  const auto count = static_cast<std::uint32_t>(symbols.size());
  std::vector<std::uint32_t> before(count), after(count);
  struct Pair {
    std::uint32_t rank, left;
    TokenId tokens[2];  // if they have changed since, the pair is void
    bool operator>(const Pair& other) const {
      return std::tie(rank, left) > std::tie(other.rank, other.left);
    }
  };
  std::priority_queue<Pair, std::vector<Pair>, std::greater<>> pairs;
  const auto add = [&](std::uint32_t left) {
    if (left == kNone || after[left] == kNone) return;
    const TokenId a = symbols[left], b = symbols[after[left]];
    if (const Merge* const merge = FindMerge(a, b)) pairs.push({merge->rank, left, {a, b}});
  };
  for (std::uint32_t i = 0; i < count; ++i) {
    before[i] = i == 0 ? kNone : i - 1;
    after[i] = i + 1 == count ? kNone : i + 1;
  }
  for (std::uint32_t i = 0; i < count; ++i) add(i);
  std::vector<bool> merged(count);  // into the symbol before it
  while (!pairs.empty()) {
    const Pair pair = pairs.top();
    pairs.pop();
    const std::uint32_t right = merged[pair.left] ? kNone : after[pair.left];
    if (right == kNone || symbols[pair.left] != pair.tokens[0] ||
        symbols[right] != pair.tokens[1]) {
      continue;
    }
    symbols[pair.left] = FindMerge(pair.tokens[0], pair.tokens[1])->token;
    merged[right] = true;
    after[pair.left] = after[right];
    if (after[right] != kNone) before[after[right]] = pair.left;
    add(before[pair.left]);
    add(pair.left);
  }
  for (std::uint32_t i = 0; i < count; ++i) {
    if (!merged[i]) tokens.push_back(symbols[i]);
  }
}

absl::Status Bpe::EncodeWord(std::string_view word, std::vector<TokenId>& tokens) const {
  std::vector<TokenId> symbols;
  for (const char c : word) {
    const std::uint8_t byte = static_cast<std::uint8_t>(c);
    const std::optional<TokenId> token = of_byte_[byte] ? of_byte_[byte] : unknown_;
    if (!token) {
      return absl::InvalidArgumentError(Concat("the vocabulary has no token for byte ",
                                               std::uint32_t{byte}, " of ", Quoted(word)));
    }
    symbols.push_back(*token);
  }
  MergeSymbols(std::move(symbols), tokens);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<TokenId>> Bpe::Encode(std::string_view text) const {
  std::vector<TokenId> tokens;
  for (const std::string_view word : SplitWords(split_, text)) {
    if (absl::Status status = EncodeWord(word, tokens); !status.ok()) return status;
  }
  return tokens;
}

std::string Bpe::Decode(std::span<const TokenId> tokens) const {
  std::string text;
  for (const TokenId token : tokens) {
    if (token < texts_.size()) {
      text += texts_[token];
    } else {
      Append(text, "<", token, ">");
    }
  }
  return text;
}

absl::Status Bpe::AddMessage(std::string_view role, std::string_view text,
                             std::vector<TokenId>& tokens) const {
  tokens.push_back(chat_->begin);
  const absl::StatusOr<std::vector<TokenId>> message = Encode(Concat(role, "\n", text));
  if (!message.ok()) return message.status();
  tokens.insert(tokens.end(), message->begin(), message->end());
  return absl::OkStatus();
}

absl::StatusOr<std::vector<TokenId>> Bpe::Prompt(std::string_view message) const {
  if (!chat_) return Encode(message);
  const absl::StatusOr<std::vector<TokenId>> line = Encode("\n");
  if (!line.ok()) return line.status();
  std::vector<TokenId> tokens;
  const auto end_message = [&] {
    tokens.push_back(chat_->end);
    tokens.insert(tokens.end(), line->begin(), line->end());
  };
  absl::Status status;
  if (!chat_->system.empty()) {
    status = AddMessage("system", chat_->system, tokens);
    end_message();
  }
  if (status.ok()) status = AddMessage("user", message, tokens);
  end_message();
  if (status.ok()) status = AddMessage("assistant", "", tokens);
  if (!status.ok()) return status;
  return tokens;
}

}  // namespace tessera::llm
