// Hands the daemon's answers to C callers as JSON.
#pragma once

#include <cstring>

#include "absl/status/statusor.h"
#include "client/api/c_handles.h"
#include "client/json/message_json.h"

namespace tessera::client {

template <typename Message>
tessera_code HandJson(const absl::StatusOr<Message>& message, tessera_text* json,
                      tessera_error* error) {
  if (!message.ok()) return Report(message.status(), error);
  tessera_text text = ::strdup(JsonOf(*message).c_str());
  if (text == nullptr) {
    return Report(absl::ResourceExhaustedError("no memory for the answer as JSON"), error);
  }
  *json = text;
  return Report(absl::OkStatus(), error);
}

}  // namespace tessera::client
