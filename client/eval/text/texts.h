// The texts that a language model reads: documents that Debian packages install.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace tessera::cli::eval {

struct EvaluationText {
  std::string path;
  std::string text;
};

// The files of these paths. Without paths: those of the default list that exist here, in its order.
// Nothing that a policy is calibrated with may be among them. NOT_FOUND names a file that cannot be
// read.
absl::StatusOr<std::vector<EvaluationText>> ReadTexts(const std::vector<std::string>& paths);

}  // namespace tessera::cli::eval
