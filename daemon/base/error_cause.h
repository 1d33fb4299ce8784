// The machine-readable cause of an error, carried as a payload of absl::Status.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace tessera {

enum class ErrorCause {
  kPoolFull,        // the node's pool has no room
  kQuota,           // a limit of the tenant: bytes, sessions, sequences, models, prefixes
  kTailRingFull,    // the daemon has not absorbed the sequence's tail yet
  kReaderSlots,     // too many steps of this session are open
  kHostMemory,      // the host tier, or the budget of raw copies and observations, is full
  kOverloaded,      // too many calls run at a time
  kSequenceFailed,  // an unusable value was found in the sequence's rows
  kSequenceBusy,    // another call or step works on the sequence
  kLeaseLost,       // the session has ended: attach again
  kDraining,        // the daemon is about to exit
  kPinRevoked,      // the daemon took the step's pin back: repeat the step
  kPolicy,          // the policy is wrong, or does not fit the model
  kArgument,        // the caller passed something invalid
};

// "pool_full" and so on: the names on the wire.
std::string_view CauseName(ErrorCause cause);

struct ErrorInfo {
  ErrorCause cause = ErrorCause::kArgument;
  std::chrono::milliseconds retry_after{0};  // 0: unknown

  friend bool operator==(const ErrorInfo&, const ErrorInfo&) = default;
};

inline constexpr char kErrorCausePayload[] = "tessera.error";

// `status` with `info` attached; OK is returned unchanged. A cause that is already there is kept,
// because the code nearest to the fault knows best.
absl::Status WithCause(absl::Status status, const ErrorInfo& info);
inline absl::Status WithCause(absl::Status status, ErrorCause cause) {
  return WithCause(std::move(status), ErrorInfo{.cause = cause});
}

// What WithCause attached; nullopt where nothing was attached or the payload is malformed.
std::optional<ErrorInfo> CauseOf(const absl::Status& status);

// The payload's text, "cause=pool_full retry_after_ms=2001", and back. ParseErrorInfo accepts text
// of an untrusted peer.
std::string FormatErrorInfo(const ErrorInfo& info);
std::optional<ErrorInfo> ParseErrorInfo(std::string_view text);

}  // namespace tessera
