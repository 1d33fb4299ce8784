// Counts the system calls of a thread with ptrace.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace tessera::cli::bench {

struct CountedRun {
  std::uint64_t calls = 0;
  std::vector<std::uint64_t> numbers;  // system call numbers in order, at most 64
};
// Runs a program and counts the system calls of its main thread between MarkBegin and MarkEnd.
// UNAVAILABLE if the system does not allow tracing.
absl::StatusOr<CountedRun> CountSystemCalls(const std::vector<std::string>& command);

// Called by the traced program: harmless system calls that the tracer recognises by their argument.
void MarkBegin();
void MarkEnd();

}  // namespace tessera::cli::bench
