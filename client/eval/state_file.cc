#include "client/eval/state_file.h"

#include <filesystem>
#include <iterator>

#include "absl/status/status.h"
#include "client/eval/unit_line.h"
#include "client/model/checkpoint/json.h"
#include "client/tools/table.h"
#include "daemon/base/strings.h"

namespace tessera::cli::eval {

namespace {

using llm::Json;
using llm::JsonValue;

std::string HeaderOf(const EvaluationPlan& plan) {
  std::string text;
  for (const auto& [flag, value] : FlagsOf(plan)) {
    Append(text, text.empty() ? "" : ", ", JsonString(flag), ": ", JsonString(value));
  }
  return Concat("{", text, "}");
}

absl::Status CheckHeader(std::string_view line, const EvaluationPlan& plan) {
  const absl::StatusOr<Json> header = llm::ParseJson(line);
  if (!header.ok()) return absl::InvalidArgumentError("not a state file of an evaluation");
  for (const auto& [flag, value] : FlagsOf(plan)) {
    const JsonValue* const begun = llm::Find(*header, flag);
    if (begun == nullptr || !begun->has_string_value()) {
      return absl::InvalidArgumentError("not a state file of an evaluation");
    }
    if (begun->string_value() == value) continue;
    return absl::InvalidArgumentError(Concat("the file was created with ", flag, " ",
                                             begun->string_value(), "; this run has ", value,
                                             ". Use the same flags or another file"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<StateFile> StateFile::Open(const std::string& path, const EvaluationPlan& plan) {
  StateFile state(path);
  std::string text;
  if (std::ifstream there(path, std::ios::binary); there) {
    text.assign(std::istreambuf_iterator<char>(there), std::istreambuf_iterator<char>());
  }
  const std::string header = HeaderOf(plan) + "\n";
  const bool begins = header.starts_with(text);  // empty, or an interrupted first line
  const std::size_t whole = begins ? 0 : text.rfind('\n') + 1;
  if (!begins) {
    if (absl::Status status = state.Read(text.substr(0, whole), plan); !status.ok()) {
      return absl::Status(status.code(),
                          Concat("\"", path, "\": ", AsStringView(status.message())));
    }
  }
  std::error_code error;
  if (whole != text.size()) std::filesystem::resize_file(path, whole, error);
  if (error) return absl::InternalError(Concat("\"", path, "\": ", error.message()));
  state.file_.open(path, std::ios::binary | std::ios::app);
  if (begins) {
    if (absl::Status status = state.Write(header); !status.ok()) return status;
  }
  return state;
}

absl::Status StateFile::Read(const std::string& text, const EvaluationPlan& plan) {
  std::size_t number = 0;
  for (std::size_t at = 0; at == 0 || at < text.size();) {
    const std::size_t end = text.find('\n', at);
    const std::string_view line = std::string_view(text).substr(at, end - at);
    at = end == std::string::npos ? text.size() : end + 1;
    if (++number == 1) {
      if (absl::Status status = CheckHeader(line, plan); !status.ok()) return status;
      if (end == std::string::npos) break;
      continue;
    }
    absl::StatusOr<FinishedUnit> unit = UnitOf(line, plan);
    if (!unit.ok()) {
      return absl::InvalidArgumentError(
          Concat("line ", number, ": ", AsStringView(unit.status().message())));
    }
    finished_.push_back(*std::move(unit));
  }
  return absl::OkStatus();
}

absl::Status StateFile::Write(const std::string& line) {
  file_ << line << std::flush;
  if (file_) return absl::OkStatus();
  return absl::InternalError(Concat("cannot write \"", path_, "\""));
}

absl::Status StateFile::Add(const FinishedUnit& unit) { return Write(LineOf(unit) + "\n"); }

}  // namespace tessera::cli::eval
