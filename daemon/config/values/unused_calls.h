// What happens to a system call that the daemon has no use for.
#pragma once

#include <cstdint>
#include <string_view>

#include "absl/status/statusor.h"

namespace tessera::config {

enum class UnusedCalls : std::uint8_t {
  kAuto,    // as the device allows: kRefuse on the CPU, kLog on a GPU
  kAllow,   // it is made
  kLog,     // it is made, and the kernel's audit log names it
  kRefuse,  // it fails with EPERM
  kKill,    // the process dies by SIGSYS
};

std::string_view UnusedCallsName(UnusedCalls unused);  // "auto", "allow", "log", "refuse", "kill"

// INVALID_ARGUMENT names the text and the accepted names.
absl::StatusOr<UnusedCalls> ParseUnusedCalls(std::string_view name);

}  // namespace tessera::config
