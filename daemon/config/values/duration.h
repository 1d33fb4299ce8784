// Parses times as people write them.
#pragma once

#include <cstdint>
#include <string_view>

#include "absl/status/statusor.h"

namespace tessera::config {

// Parses "250" and "250ms", "1.5s", "5m" or "1h" as milliseconds. INVALID_ARGUMENT names the text
// and what is accepted. A value must be a whole number of milliseconds and fit 64 bits.
absl::StatusOr<std::uint64_t> ParseMilliseconds(std::string_view text);

}  // namespace tessera::config
