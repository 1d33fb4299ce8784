// Finds a model by its path, or by the name under which deploy/models/fetch keeps it.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace tessera::cli {

// A path as it is, or the model's file in the cache folder. INVALID_ARGUMENT says how to fetch it.
absl::StatusOr<std::string> FindModel(const std::string& path_or_name);

// Whether the path is a language model's, rather than that of a model with a vocabulary of words.
bool IsLanguageModel(const std::string& path);

}  // namespace tessera::cli
