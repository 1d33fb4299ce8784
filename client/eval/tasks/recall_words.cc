#include "client/eval/tasks/recall_words.h"

#include <map>
#include <string>

namespace tessera::cli::eval {

namespace {

struct Role {
  Tokens RecallWords::*tokens;
  // Words of a role have consecutive token ids, from `first` to `last`.
  const char* first;
  const char* last;
  const char* slot;  // its name in templates; null: not used there
};

constexpr Role kRoles[] = {
    {&RecallWords::names, "anna", "pedro", "N"},
    {&RecallWords::verbs, "saw", "broke", "V"},
    {&RecallWords::objects, "lamp", "whistle", "O"},
    {&RecallWords::places, "kitchen", "tunnel", "P"},
    {&RecallWords::adjectives, "old", "clever", "A"},
    {&RecallWords::times, "yesterday", "evening", "T"},
    {&RecallWords::adverbs, "slowly", "badly", "AV"},
    {&RecallWords::keys, "falcon", "lotus", "K"},
    {&RecallWords::digits, "0", "9", "D"},
    {&RecallWords::variables, "QA", "YH", nullptr},
    {&RecallWords::numbers, "10", "99", nullptr},
};

constexpr struct {
  TokenId RecallWords::*token;
  const char* word;
} kWords[] = {
    {&RecallWords::begin, "<bos>"}, {&RecallWords::newline, "\n"}, {&RecallWords::dot, "."},
    {&RecallWords::comma, ","},     {&RecallWords::the, "the"},    {&RecallWords::var, "VAR"},
    {&RecallWords::equals, "="},
};

constexpr struct {
  Tokens RecallWords::*tokens;
  const char* words;
} kParts[] = {
    {&RecallWords::fact, "the special number for"},
    {&RecallWords::is, "is :"},
    {&RecallWords::signal, "the signal is"},
    {&RecallWords::in_the, "in the"},
    {&RecallWords::ask_one, "what is the special number for"},
    {&RecallWords::ask_several, "what are the special numbers for"},
    {&RecallWords::ask_all, "what are all the special numbers for"},
    {&RecallWords::ask_variables, "list all variables with the value"},
    {&RecallWords::ask_signal, "which signal is most frequent"},
    {&RecallWords::ask_place, "where did"},
    {&RecallWords::ask_end, "? answer :"},
};

constexpr const char* kTemplates[] = {
    "N V the O in the P .",
    "N V the A O in the P .",
    "T , N and N V the O .",
    "the A O was AV V by N ; N was A .",
    "did N V the O near the P ?",
    "what a A O !",
    "N said : the O is in the P .",
    "there were D D A O in the P .",
    "the weather in the P was A , but N felt A .",
    "N AV V the O , and then N V the A O .",
    "on T the P was A and A .",
    "N V the A O because the O was A .",
    "who V the O behind the P ?",
    "N was in the P ; the O was under the O .",
    "the number of O in the P was D D D .",
    "N found the K near the P .",
    "the K and the K were in the P .",
    "T : N V D O .",
};

absl::StatusOr<std::vector<RecallWords::Slot>> Parse(const llm::Vocab& vocab,
                                                     std::string_view text) {
  std::vector<RecallWords::Slot> slots;
  while (!text.empty()) {
    const std::string word(text.substr(0, text.find(' ')));
    text.remove_prefix(std::min(text.size(), word.size() + 1));
    const Role* role = nullptr;
    for (const Role& candidate : kRoles) {
      if (candidate.slot != nullptr && candidate.slot == word) role = &candidate;
    }
    if (role != nullptr) {
      slots.emplace_back(role->tokens);
      continue;
    }
    const absl::StatusOr<TokenId> token = vocab.Find(word);
    if (!token.ok()) return token.status();
    slots.emplace_back(*token);
  }
  return slots;
}

}  // namespace

absl::StatusOr<RecallWords> RecallWords::Of(const llm::Vocab& vocab) {
  RecallWords words;
  for (const Role& role : kRoles) {
    const absl::StatusOr<TokenId> first = vocab.Find(role.first);
    if (!first.ok()) return first.status();
    const absl::StatusOr<TokenId> last = vocab.Find(role.last);
    if (!last.ok()) return last.status();
    for (TokenId token = *first; token <= *last; ++token) (words.*role.tokens).push_back(token);
  }
  for (const auto& [token, word] : kWords) {
    const absl::StatusOr<TokenId> found = vocab.Find(word);
    if (!found.ok()) return found.status();
    words.*token = *found;
  }
  for (const auto& [tokens, text] : kParts) {
    absl::StatusOr<Tokens> encoded = vocab.Encode(text);
    if (!encoded.ok()) return encoded.status();
    words.*tokens = *std::move(encoded);
  }
  for (const char* const text : kTemplates) {
    absl::StatusOr<std::vector<Slot>> slots = Parse(vocab, text);
    if (!slots.ok()) return slots.status();
    words.templates.push_back(*std::move(slots));
  }
  return words;
}

}  // namespace tessera::cli::eval
