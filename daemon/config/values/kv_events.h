// How KV events are written; see cluster/events.
#pragma once

#include <cstdint>
#include <string_view>

#include "absl/status/statusor.h"

namespace tessera::config {

enum class EventEncoding : std::uint8_t { kMap, kArray };

std::string_view EventEncodingName(EventEncoding encoding);  // "map", "array"

// INVALID_ARGUMENT names the text and the accepted names.
absl::StatusOr<EventEncoding> ParseEventEncoding(std::string_view name);

}  // namespace tessera::config
