// Finished units in a file of JSON lines, so that an interrupted evaluation can resume. The first
// line holds the plan's flags; each further line is one unit.
#pragma once

#include <fstream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/eval/plan.h"

namespace tessera::cli::eval {

class StateFile {
 public:
  // Creates the file, or reads it. A last line without a line break is an interrupted write and is
  // cut off. INVALID_ARGUMENT names the flag whose value differs from the file's, or the line that
  // cannot be read.
  static absl::StatusOr<StateFile> Open(const std::string& path, const EvaluationPlan& plan);

  const std::vector<FinishedUnit>& finished() const { return finished_; }
  absl::Status Add(const FinishedUnit& unit);

 private:
  explicit StateFile(const std::string& path) : path_(path) {}
  absl::Status Read(const std::string& text, const EvaluationPlan& plan);
  absl::Status Write(const std::string& line);

  std::string path_;
  std::ofstream file_;
  std::vector<FinishedUnit> finished_;
};

}  // namespace tessera::cli::eval
