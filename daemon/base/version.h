#pragma once

#include <string_view>

namespace tessera {

// "0.1.0": the project version of the build.
std::string_view Version();

}  // namespace tessera
