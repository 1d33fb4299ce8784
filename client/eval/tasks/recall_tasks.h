// Samples for the recall model: questions about needles in generated sentences. Identical to the
// generator that the model was trained with (tests/golden/recall).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "client/eval/tasks/recall_words.h"

namespace tessera::cli::eval {

struct RecallQuery {
  std::string task;
  std::uint32_t length = 1024;  // tokens; prompt and answer may be up to one sentence shorter
  double depth = 0.5;           // position of the requested needle: 0 start, 1 end
  std::uint32_t seed = 0;
};

struct RecallSample {
  Tokens prompt;  // ends in "answer :"
  Tokens answer;  // ends in "."; greedy decoding must produce exactly this
  // Length of the question at the prompt's end, with the line break before it. Blind compression
  // covers the tokens before it.
  std::size_t question_tokens = 0;
};

class RecallTasks {
 public:
  static constexpr std::uint32_t kMinLength = 128;
  static constexpr std::uint32_t kMaxLength = 2304;  // positions of the model

  // NOT_FOUND if the vocabulary is not the recall model's.
  static absl::StatusOr<RecallTasks> Create(const llm::Vocab& vocab);
  static std::span<const char* const> Names();

  // INVALID_ARGUMENT names the value that is out of range. Any thread may call it.
  absl::StatusOr<RecallSample> Sample(const RecallQuery& query) const;

 private:
  explicit RecallTasks(RecallWords words) : words_(std::move(words)) {}
  const RecallWords words_;
};

}  // namespace tessera::cli::eval
