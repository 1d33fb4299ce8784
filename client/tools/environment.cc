#include "client/tools/environment.h"

#include <cstdlib>

namespace tessera::cli {

std::string ReadEnvironment(const std::string& name) {
  const char* const value = std::getenv(name.c_str());
  return value == nullptr ? "" : value;
}

}  // namespace tessera::cli
