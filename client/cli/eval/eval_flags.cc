#include "client/cli/eval/eval_flags.h"

#include <cctype>
#include <ctime>
#include <filesystem>
#include <fstream>

#include "absl/status/status.h"

namespace tessera::cli {

using eval::PolicyAt;
using eval::Question;

std::vector<std::string> SplitList(std::string_view list) {
  std::vector<std::string> items;
  while (!list.empty()) {
    const std::size_t end = std::min(list.find(','), list.size());
    items.emplace_back(Trim(list.substr(0, end)));
    list.remove_prefix(std::min(end + 1, list.size()));
  }
  return items;
}

std::string Given(const Flags& flags, const char* name, const char* quick, const char* full) {
  if (flags.Has(name)) return flags.Get(name);
  return flags.Has("quick") ? quick : full;
}

absl::StatusOr<std::vector<PolicyAt>> PoliciesOf(const Flags& flags,
                                                 std::span<const char* const> defaults) {
  const auto budgets = Numbers<double>("budgets", flags.Get("budgets"));
  if (!budgets.ok()) return budgets.status();
  for (const double budget : *budgets) {
    if (budget > 0 && budget <= 1) continue;
    return absl::InvalidArgumentError(
        Concat("--budgets: ", budget, " is out of range; a budget is above 0 and at most 1"));
  }
  std::vector<std::string> given = flags.positional();
  if (given.empty()) given.assign(defaults.begin(), defaults.end());
  std::vector<PolicyAt> policies;
  for (const std::string& text : given) {
    if (!PolicyAt::HasPlace(text)) {
      AddNew<PolicyAt>({.text = text}, policies);
      continue;
    }
    for (const double budget : *budgets) {
      AddNew<PolicyAt>({.text = text, .budget = budget}, policies);
    }
  }
  return policies;
}

absl::StatusOr<std::vector<Question>> QuestionsOf(const Flags& flags) {
  std::vector<Question> questions;
  for (const std::string& name : SplitList(flags.Get("question"))) {
    if (name != "blind" && name != "seen") {
      return absl::InvalidArgumentError(Concat("--question: \"", name, "\" must be blind or seen"));
    }
    AddNew(name == "blind" ? Question::kBlind : Question::kSeen, questions);
  }
  if (questions.empty()) return absl::InvalidArgumentError("--question is empty");
  return questions;
}

absl::Status WriteFile(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text << std::flush;
  if (file) return absl::OkStatus();
  return absl::InternalError(Concat("cannot write \"", path, "\""));
}

absl::Status CheckWritable(const char* flag, const std::string& path) {
  std::error_code error;  // ignored: opening the file fails, too
  const bool there = std::filesystem::exists(path, error);
  if (std::ofstream(path, std::ios::binary | std::ios::app)) {
    if (!there) std::filesystem::remove(path, error);
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(Concat("--", flag, ": \"", path, "\" cannot be written"));
}

std::string CsvBeside(const std::string& page) {
  std::filesystem::path path(page);
  const std::string extension = path.extension().string();
  if (extension == ".html" || extension == ".htm") path.replace_extension();
  return path.string() + ".csv";
}

std::string ShellCommand(std::span<const std::string_view> args) {
  std::string command = "tessera eval";
  for (const std::string_view arg : args) {
    const bool plain = !arg.empty() && std::ranges::all_of(arg, [](unsigned char c) {
      return std::isalnum(c) || std::string_view("-_=.,:/+%@").find(c) != std::string_view::npos;
    });
    if (plain) {
      Append(command, " ", arg);
      continue;
    }
    command += " '";
    for (const char c : arg) command += c == '\'' ? "'\\''" : std::string(1, c);
    command += "'";
  }
  return command;
}

std::string NowInUtc() {
  const std::time_t now = std::time(nullptr);
  std::tm utc = {};
  ::gmtime_r(&now, &utc);
  char text[32];
  return {text, std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M UTC", &utc)};
}

}  // namespace tessera::cli
