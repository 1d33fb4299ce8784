// The texts of `tessera help`.
#pragma once

#include <string>
#include <vector>

namespace tessera::cli {

// What `tessera` without a command prints.
std::string Overview();

std::vector<std::string> CommandNames();

// The manual page tessera(1), as troff input.
std::string ManualPage();

// A script that completes commands, flags and their values in bash.
std::string BashCompletion();

}  // namespace tessera::cli
