// Attaches causes to statuses; GetErrorInfo (tessera/error.h) reads them.
#pragma once

#include <chrono>
#include <string_view>

#include "absl/status/status.h"
#include "tessera/error.h"

namespace tessera::client {

// For example "pool_full"; "unspecified" for unknown values.
std::string_view CauseName(ErrorCause cause);

// Adds the cause, unless the status is OK or already has one.
absl::Status WithCause(absl::Status status, ErrorCause cause,
                       std::chrono::milliseconds retry_after = {});

// Replaces the message; the code and the cause are kept.
absl::Status WithMessage(const absl::Status& status, std::string_view message);

// INVALID_ARGUMENT with the message "CALL: WHAT" and the cause kArgument.
absl::Status BadArgument(std::string_view call, std::string_view what);

}  // namespace tessera::client
