// Standard output, with its errors.
#pragma once

#include <string_view>

#include "absl/status/status.h"

namespace tessera::cli {

// Writes the text to standard output at once. DATA_LOSS says why it could not be written; CANCELLED
// means that the reader of a pipe has left.
absl::Status Print(std::string_view text);

// Prepares the process for an output that fails: a reader that leaves is reported by Print instead
// of ending the process, and a closed descriptor 0, 1 or 2 is not taken by the next file or socket.
// Call it before anything is opened.
void GuardStandardFiles();

}  // namespace tessera::cli
