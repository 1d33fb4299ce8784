#pragma once

#include <string_view>

namespace tessera {

// The project version of the build, e.g. "0.1.0".
std::string_view Version();

// The commit that was built (-DTESSERA_COMMIT=...); empty if the build did not set it.
std::string_view Commit();

}  // namespace tessera
