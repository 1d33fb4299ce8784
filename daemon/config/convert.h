// Converts between the protobuf message, JSON and Config. Used inside this folder only: nothing
// else knows that the configuration is a protobuf.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "daemon/config/config.h"
#include "tessera/v1/config.pb.h"

namespace tessera::config {

// Absent fields keep the defaults of Config. Does not read token files.
absl::StatusOr<Config> FromMessage(const tessera::v1::DaemonConfig& message);

// Sets every field, except a token that was read from a file: only token_file is set then.
tessera::v1::DaemonConfig ToMessage(const Config& config);

std::string ToJson(const tessera::v1::DaemonConfig& message);

}  // namespace tessera::config
