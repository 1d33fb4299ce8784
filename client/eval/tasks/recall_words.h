// The words of the recall model's texts, by the role they play, and its sentences.
#pragma once

#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "client/model/checkpoint/vocab.h"

namespace tessera::cli::eval {

using llm::TokenId;
using Tokens = std::vector<TokenId>;

struct RecallWords {
  // NOT_FOUND where the vocabulary is another model's.
  static absl::StatusOr<RecallWords> Of(const llm::Vocab& vocab);

  Tokens names, verbs, objects, places, adjectives, times, adverbs, keys, digits;
  Tokens variables, numbers;
  TokenId begin, newline, dot, comma;
  TokenId the, var, equals;

  // What filler sentences are drawn from: a word, or any of a role.
  using Slot = std::variant<TokenId, const Tokens RecallWords::*>;
  std::vector<std::vector<Slot>> templates;

  // Parts of needles and questions.
  Tokens fact, is, signal, in_the;
  Tokens ask_one, ask_several, ask_all, ask_variables, ask_signal, ask_place, ask_end;
};

}  // namespace tessera::cli::eval
