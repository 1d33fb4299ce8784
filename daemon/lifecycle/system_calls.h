// Which system calls the process may still make once it serves.
//
// A daemon that somebody has taken over through a bug of its own should be of no use to them: it
// runs no program, maps no new code, traces nobody and opens no other kind of socket than its own.
#pragma once

#include "absl/status/status.h"
#include "daemon/config/values/unused_calls.h"

namespace tessera::lifecycle {

// Takes the calls away from all threads, for good; kAuto refuses them. Needs GiveUpPrivileges
// first. UNIMPLEMENTED if the kernel has no such filters.
absl::Status LimitSystemCalls(config::UnusedCalls unused);

}  // namespace tessera::lifecycle
