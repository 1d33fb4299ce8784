#include "client/eval/unit_line.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/status/status.h"
#include "client/model/checkpoint/json.h"
#include "client/tools/table.h"
#include "daemon/base/strings.h"

namespace tessera::cli::eval {

namespace {

using llm::Json;
using llm::JsonValue;

std::string ExampleText(const Example& example) {
  if (example.question.empty()) return "";
  std::string answers;
  for (const std::string& answer : example.answers) {
    Append(answers, answers.empty() ? "" : ", ", JsonString(answer));
  }
  return Concat(", \"example\": {\"question\": ", JsonString(example.question),
                ", \"answer\": ", JsonString(example.answer), ", \"answers\": [", answers, "]}");
}

std::string TextOf(const Json& json, const std::string& name) {
  const JsonValue* const value = llm::Find(json, name);
  return value == nullptr ? "" : value->string_value();
}

Example ExampleOf(const Json& json) {
  Example example = {.question = TextOf(json, "question"), .answer = TextOf(json, "answer")};
  if (const JsonValue* const answers = llm::Find(json, "answers"); answers != nullptr) {
    for (const JsonValue& answer : answers->list_value().values()) {
      example.answers.push_back(answer.string_value());
    }
  }
  return example;
}

absl::StatusOr<Outcome> OutcomeOf(const Json& json, const EvaluationPlan& plan) {
  const absl::StatusOr<std::uint64_t> right = llm::Count(json, "right");
  const absl::StatusOr<std::uint64_t> samples = llm::Count(json, "samples");
  const absl::StatusOr<double> bytes_kept = llm::Number(json, "bytes_kept");
  const absl::StatusOr<double> step_ms = llm::Number(json, "step_ms");
  for (const absl::Status& status :
       {right.status(), samples.status(), bytes_kept.status(), step_ms.status()}) {
    if (!status.ok()) return status;
  }
  if (*right > *samples || *samples > plan.samples || !std::isfinite(*bytes_kept)) {
    return absl::InvalidArgumentError(Concat(*right, " right of ", *samples,
                                             " samples contradict the plan's ", plan.samples,
                                             " samples, or bytes kept are invalid: ", *bytes_kept));
  }
  const std::string marks = TextOf(json, "marks");
  const auto ones = static_cast<std::uint64_t>(std::count(marks.begin(), marks.end(), '1'));
  const auto zeros = static_cast<std::uint64_t>(std::count(marks.begin(), marks.end(), '0'));
  if (!marks.empty() &&
      (marks.size() != plan.samples || marks.find_first_not_of("10-") != std::string::npos ||
       ones != *right || ones + zeros != *samples)) {
    return absl::InvalidArgumentError(Concat("marks \"", marks, "\" contradict ", *right,
                                             " right of ", *samples, " samples, planned ",
                                             plan.samples));
  }
  return Outcome{.right = static_cast<std::uint32_t>(*right),
                 .samples = static_cast<std::uint32_t>(*samples),
                 .bytes_kept = *bytes_kept,
                 .step_ms = *step_ms,
                 .not_packed = TextOf(json, "not_packed"),
                 .refused = TextOf(json, "refused"),
                 .marks = marks};
}

}  // namespace

std::string LineOf(const FinishedUnit& unit) {
  std::string text;
  for (const Outcome& outcome : unit.outcomes) {
    Append(text, text.empty() ? "" : ", ", "{\"right\": ", outcome.right,
           ", \"samples\": ", outcome.samples, ", \"bytes_kept\": ", outcome.bytes_kept,
           ", \"step_ms\": ", outcome.step_ms);
    if (!outcome.not_packed.empty()) {
      Append(text, ", \"not_packed\": ", JsonString(outcome.not_packed));
    }
    if (!outcome.refused.empty()) Append(text, ", \"refused\": ", JsonString(outcome.refused));
    if (!outcome.marks.empty()) Append(text, ", \"marks\": ", JsonString(outcome.marks));
    text += "}";
  }
  return Concat("{\"unit\": ", unit.unit, ", \"outcomes\": [", text, "]", ExampleText(unit.example),
                "}");
}

absl::StatusOr<FinishedUnit> UnitOf(std::string_view line, const EvaluationPlan& plan) {
  const absl::StatusOr<Json> json = llm::ParseJson(line);
  if (!json.ok()) return json.status();
  const absl::StatusOr<std::uint64_t> number = llm::Count(*json, "unit");
  if (!number.ok()) return number.status();
  const JsonValue* const outcomes = llm::Find(*json, "outcomes");
  const int count = outcomes == nullptr ? 0 : outcomes->list_value().values_size();
  if (*number >= UnitsOf(plan).size() || static_cast<std::size_t>(count) != plan.policies.size()) {
    return absl::InvalidArgumentError(
        Concat("unit ", *number, " with ", count, " outcomes is not part of the plan"));
  }
  FinishedUnit unit = {.unit = *number};
  for (const JsonValue& value : outcomes->list_value().values()) {
    absl::StatusOr<Outcome> outcome = OutcomeOf(value.struct_value(), plan);
    if (!outcome.ok()) return outcome.status();
    unit.outcomes.push_back(*std::move(outcome));
  }
  if (const JsonValue* const example = llm::Find(*json, "example"); example != nullptr) {
    unit.example = ExampleOf(example->struct_value());
    if (unit.example.answers.size() != plan.policies.size()) {
      return absl::InvalidArgumentError(
          Concat("unit ", *number, ": the example has ", unit.example.answers.size(), " answers"));
    }
  }
  return unit;
}

}  // namespace tessera::cli::eval
