// Flags and files that evaluations with either kind of model share.
#pragma once

#include <algorithm>
#include <charconv>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "client/eval/plan.h"
#include "client/tools/flags.h"
#include "daemon/base/strings.h"

namespace tessera::cli {

// The items of a list with commas.
std::vector<std::string> SplitList(std::string_view list);

// Skips duplicates, which would be counted twice.
template <typename Value>
void AddNew(Value value, std::vector<Value>& values) {
  if (std::ranges::find(values, value) == values.end()) values.push_back(std::move(value));
}

// The flag's value, or its default with and without --quick.
std::string Given(const Flags& flags, const char* name, const char* quick, const char* full);

template <typename Value>
absl::StatusOr<std::vector<Value>> Numbers(const char* name, const std::string& list) {
  std::vector<Value> numbers;
  for (const std::string& item : SplitList(list)) {
    Value value = {};
    const char* const end = item.data() + item.size();
    const auto result = std::from_chars(item.data(), end, value);
    if (result.ec != std::errc() || result.ptr != end) {
      return absl::InvalidArgumentError(Concat("--", name, ": \"", item, "\" is not a number"));
    }
    AddNew(value, numbers);
  }
  if (numbers.empty()) return absl::InvalidArgumentError(Concat("--", name, " is empty"));
  return numbers;
}

// The policies of the command line, or those of `defaults`, at each of --budgets.
absl::StatusOr<std::vector<eval::PolicyAt>> PoliciesOf(const Flags& flags,
                                                       std::span<const char* const> defaults);
absl::StatusOr<std::vector<eval::Question>> QuestionsOf(const Flags& flags);

absl::Status WriteFile(const std::string& path, const std::string& text);
// Checked before the run, which may take hours.
absl::Status CheckWritable(const char* flag, const std::string& path);
// The CSV file beside a page: "eval.html" -> "eval.csv", "eval" -> "eval.csv".
std::string CsvBeside(const std::string& page);
// The command, quoted for a POSIX shell.
std::string ShellCommand(std::span<const std::string_view> args);
std::string NowInUtc();

}  // namespace tessera::cli
