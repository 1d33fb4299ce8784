#pragma once

#include <string_view>

namespace tessera {

// The project version of the build, e.g. "0.1.0".
std::string_view Version();

}  // namespace tessera
