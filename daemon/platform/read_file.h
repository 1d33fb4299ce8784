// Reads a small file: configuration, tokens, keys.
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"

namespace tessera {

// The content of a regular file of at most `limit` bytes. Never waits for a writer: pipes and
// devices are refused, and so are folders.
absl::StatusOr<std::string> ReadFile(const std::string& path, std::size_t limit);

// PERMISSION_DENIED if others could read a secret, or change it: a file of this user must have mode
// 0600 or less, and one of root 0640 or less, as mounted secrets and credentials have. OK if there
// is no such file: reading it says so.
absl::Status CheckSecret(const std::string& path);

}  // namespace tessera
