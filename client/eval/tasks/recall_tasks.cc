#include "client/eval/tasks/recall_tasks.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "absl/status/status.h"
#include "client/eval/tasks/recall_document.h"
#include "daemon/base/strings.h"

namespace tessera::cli::eval {

namespace {

// The order must not change: a task's index is part of its samples' seeds.
constexpr const char* kNames[] = {
    "niah_single", "niah_multikey", "niah_multivalue", "niah_multiquery", "vt1",
    "vt2",         "fwe",           "qa_place"};
enum class Task {
  kSingle,
  kMultiKey,
  kMultiValue,
  kMultiQuery,
  kVariables1,
  kVariables2,
  kSignal,
  kPlace
};

void Ask(Task task, std::size_t others, double depth, RecallDocument& document) {
  switch (task) {
    case Task::kSingle:
      return document.AskFact(0, depth);
    case Task::kMultiKey:
      return document.AskFact(others, depth);
    case Task::kMultiValue:
      return document.AskAllValues(2, others / 2, depth);
    case Task::kMultiQuery:
      return document.AskFacts(3, others / 2, depth);
    case Task::kVariables1:
      return document.AskVariables(1, 3, depth);
    case Task::kVariables2:
      return document.AskVariables(2, 3, depth);
    case Task::kSignal:
      return document.AskSignal(6, 8, 4);
    case Task::kPlace:
      return document.AskPlace(depth);
  }
}

// FNV-1a over 32-bit words, with the training generator's basis.
std::uint64_t SeedOf(Task task, const RecallQuery& query) {
  std::uint64_t hash = 1469598103934665603;
  const auto thousandths = static_cast<std::uint32_t>(std::nearbyint(query.depth * 1000));
  for (const std::uint32_t word :
       {static_cast<std::uint32_t>(task), query.length, thousandths, query.seed}) {
    hash = (hash ^ word) * 1099511628211;
  }
  return hash;
}

}  // namespace

absl::StatusOr<RecallTasks> RecallTasks::Create(const llm::Vocab& vocab) {
  absl::StatusOr<RecallWords> words = RecallWords::Of(vocab);
  if (!words.ok()) return words.status();
  return RecallTasks(*std::move(words));
}

std::span<const char* const> RecallTasks::Names() { return kNames; }

absl::StatusOr<RecallSample> RecallTasks::Sample(const RecallQuery& query) const {
  const auto it = std::find(std::begin(kNames), std::end(kNames), query.task);
  if (it == std::end(kNames)) {
    std::string known;
    for (const char* const name : kNames) Append(known, known.empty() ? "" : ", ", name);
    return absl::InvalidArgumentError(Concat(Quoted(query.task), " is not one of ", known));
  }
  if (query.length < kMinLength || query.length > kMaxLength) {
    return absl::InvalidArgumentError(
        Concat("length is ", query.length, "; it must be from ", kMinLength, " to ", kMaxLength));
  }
  if (!(query.depth >= 0 && query.depth <= 1)) {
    return absl::InvalidArgumentError(Concat("depth is ", query.depth, "; it must be from 0 to 1"));
  }
  const Task task = static_cast<Task>(it - std::begin(kNames));
  RecallDocument document(words_, SeedOf(task, query));
  // Longer texts have more distracting needles.
  Ask(task, std::clamp<std::size_t>(query.length / 64, 3, 24), query.depth, document);
  RecallSample sample;
  sample.answer = document.answer();
  sample.prompt = document.Context(static_cast<std::int64_t>(query.length) -
                                   static_cast<std::int64_t>(document.question().size()) -
                                   static_cast<std::int64_t>(sample.answer.size()) - 2);
  sample.question_tokens = 1 + document.question().size();
  sample.prompt.push_back(words_.newline);
  sample.prompt.insert(sample.prompt.end(), document.question().begin(), document.question().end());
  return sample;
}

}  // namespace tessera::cli::eval
