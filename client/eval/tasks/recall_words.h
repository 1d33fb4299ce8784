// The recall model's words by role, and its sentence templates.
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
  // NOT_FOUND if the vocabulary is another model's.
  static absl::StatusOr<RecallWords> Of(const llm::Vocab& vocab);

  Tokens names, verbs, objects, places, adjectives, times, adverbs, keys, digits;
  Tokens variables, numbers;
  TokenId begin, newline, dot, comma;
  TokenId the, var, equals;

  // Templates of filler sentences: each slot is a word, or any word of a role.
  using Slot = std::variant<TokenId, const Tokens RecallWords::*>;
  std::vector<std::vector<Slot>> templates;

  // Parts of needles and questions.
  Tokens fact, is, signal, in_the;
  Tokens ask_one, ask_several, ask_all, ask_variables, ask_signal, ask_place, ask_end;
};

}  // namespace tessera::cli::eval
