// Hides numbers in a text and asks for them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/model/checkpoint/tokenizer.h"

namespace tessera::cli::eval {

struct NeedleText {
  struct Question {
    std::vector<llm::TokenId> question, answer;
  };
  std::vector<llm::TokenId> context;  // exactly the length asked for
  std::vector<Question> questions;    // one per needle, in the order of the text
};

// `count` needles, evenly spaced at the ends of sentences of `text`. Depends on the arguments
// alone. INVALID_ARGUMENT if the text is too short.
absl::StatusOr<NeedleText> HideNeedles(const llm::Tokenizer& tokenizer,
                                       std::span<const llm::TokenId> text, std::uint32_t length,
                                       std::uint32_t count, std::uint32_t seed);

}  // namespace tessera::cli::eval
