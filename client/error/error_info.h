// Statuses with a cause, as GetErrorInfo reads it (tessera/error.h).
#pragma once

#include <chrono>
#include <string_view>

#include "absl/status/status.h"
#include "tessera/error.h"

namespace tessera::client {

// The payload of a status: "cause=NAME retry_after_ms=N".
inline constexpr char kErrorPayload[] = "tessera.error";

// "pool_full"; "unspecified" for values that are no cause.
std::string_view CauseName(ErrorCause cause);

// The status with this cause, unless it is OK or has one already.
absl::Status WithCause(absl::Status status, ErrorCause cause,
                       std::chrono::milliseconds retry_after = {});

// Another message for the same error: the code and the cause are kept.
absl::Status WithMessage(const absl::Status& status, std::string_view message);

// INVALID_ARGUMENT: "CALL: WHAT", with the cause kArgument.
absl::Status BadArgument(std::string_view call, std::string_view what);

}  // namespace tessera::client
