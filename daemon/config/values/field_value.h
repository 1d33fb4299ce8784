// Sets a field of the configuration from the text of a flag or of a quoted JSON value.
#pragma once

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <string_view>

#include "absl/status/status.h"

namespace tessera::config {

// By the field's type and name: sizes ("8GiB") for "*_bytes", times ("10s") for "*_ms", whole
// numbers, and true or false. Strings are taken as they are; a repeated field gets one more value.
// INVALID_ARGUMENT names the text and what is accepted, but not the field.
absl::Status SetFromText(const google::protobuf::FieldDescriptor* field, std::string_view text,
                         google::protobuf::Message& out);

}  // namespace tessera::config
