// Environment variables: the only place where the command reads them.
#pragma once

#include <string>

namespace tessera::cli {

// The value of a variable; empty if it is unset.
std::string ReadEnvironment(const std::string& name);

}  // namespace tessera::cli
