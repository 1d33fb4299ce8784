#include "daemon/config/values/kv_events.h"

#include "daemon/base/strings.h"

namespace tessera::config {

std::string_view EventEncodingName(EventEncoding encoding) {
  return encoding == EventEncoding::kMap ? "map" : "array";
}

absl::StatusOr<EventEncoding> ParseEventEncoding(std::string_view name) {
  for (const EventEncoding encoding : {EventEncoding::kMap, EventEncoding::kArray}) {
    if (name == EventEncodingName(encoding)) return encoding;
  }
  return absl::InvalidArgumentError(Concat("\"", name, "\" is not map or array"));
}

}  // namespace tessera::config
