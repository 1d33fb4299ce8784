// What of an evaluation is finished, in a file of JSON lines: what was asked, then a line for each
// unit. Who is interrupted goes on from there.
#pragma once

#include <fstream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/eval/plan.h"

namespace tessera::cli::eval {

class StateFile {
 public:
  // Begins a file, or reads what there is. A torn last line is cut off: it is what an interrupted
  // run was about to say. INVALID_ARGUMENT names the flag in which this run differs from the one
  // that began the file, or the line that is none of its own.
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
