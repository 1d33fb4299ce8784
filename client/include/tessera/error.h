// Why a call failed, for programs. absl::Status carries the code and a message for people; this
// adds a cause and the time after which a retry makes sense.
#pragma once

#include <chrono>
#include <cstdint>

#include "absl/status/status.h"

namespace tessera::client {

// The numbers are part of the C interface (tessera_cause): never reuse one.
enum class ErrorCause : std::uint32_t {
  kUnspecified = 0,
  kPoolFull = 1,        // the node's pool has no room
  kQuota = 2,           // a limit is reached: of bytes, sessions, sequences, models or prefixes
  kTailRingFull = 3,    // the daemon has not absorbed enough committed tokens
  kReaderSlots = 4,     // too many steps of this session are in flight
  kHostMemory = 5,      // the daemon's host memory has no room
  kSequenceFailed = 6,  // the daemon has marked the sequence FAILED
  kSequenceBusy = 7,    // another call or step uses the sequence
  kLeaseLost = 8,       // the session has ended: reattach
  kDraining = 9,        // the daemon is shutting down and accepts no new sequences
  kPinRevoked = 10,     // the step was aborted: begin it again
  kPolicy = 11,         // the policy is wrong, or does not fit the model
  kArgument = 12,       // an argument is wrong
  kOverloaded = 13,     // the daemon runs too many calls
};

struct ErrorInfo {
  ErrorCause cause = ErrorCause::kUnspecified;
  std::chrono::milliseconds retry_after{0};  // 0: unknown, or a retry will not help
};

// kUnspecified if the status is OK or carries no cause.
ErrorInfo GetErrorInfo(const absl::Status& status);

}  // namespace tessera::client
