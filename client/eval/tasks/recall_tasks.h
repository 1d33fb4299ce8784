// Questions about needles in a haystack of made-up sentences, for the recall model. The same
// samples as the generator that it was trained with: tests/golden/recall.
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
  std::uint32_t length = 1024;  // tokens; prompt and answer have up to a sentence less
  double depth = 0.5;           // where the needle asked for lies: 0 the start, 1 the end
  std::uint32_t seed = 0;
};

struct RecallSample {
  Tokens prompt;  // ends in "answer :"
  Tokens answer;  // ends in "."; greedy decoding must give exactly this
  // The prompt's last tokens, from the line break before the question on. What stands before them
  // can be compressed by whoever does not know the question yet.
  std::size_t question_tokens = 0;
};

class RecallTasks {
 public:
  static constexpr std::uint32_t kMinLength = 128;
  static constexpr std::uint32_t kMaxLength = 2304;  // the model has no more positions

  // NOT_FOUND where the vocabulary is not the recall model's.
  static absl::StatusOr<RecallTasks> Create(const llm::Vocab& vocab);
  static std::span<const char* const> Names();

  // INVALID_ARGUMENT names what is out of range. Thread-safe.
  absl::StatusOr<RecallSample> Sample(const RecallQuery& query) const;

 private:
  explicit RecallTasks(RecallWords words) : words_(std::move(words)) {}
  const RecallWords words_;
};

}  // namespace tessera::cli::eval
