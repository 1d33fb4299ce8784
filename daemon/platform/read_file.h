// Reads a small file: configuration, tokens, keys.
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"

namespace tessera {

// The content of a regular file of at most `limit` bytes. Never waits for a writer: pipes and
// devices are refused, and so are folders.
absl::StatusOr<std::string> ReadFile(const std::string& path, std::size_t limit);

}  // namespace tessera
