// Between the protobuf message and the plain struct. Only load.cc, flags.cc and their tests see
// this header: nothing outside of the folder knows that the configuration is a protobuf.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "daemon/config/config.h"
#include "tessera/v1/config.pb.h"

namespace tessera::config {

// Strict: an unknown field, a wrong type or a trailing comma is INVALID_ARGUMENT, with the place.
absl::Status FromJson(std::string_view json, tessera::v1::DaemonConfig* message);

// Absent fields keep the defaults of Config. Token files are not read here.
absl::StatusOr<Config> FromMessage(const tessera::v1::DaemonConfig& message);

// Every field is set. A token that came from a file is left out: the file's name stands for it.
tessera::v1::DaemonConfig ToMessage(const Config& config);

std::string ToJson(const tessera::v1::DaemonConfig& message);

}  // namespace tessera::config
