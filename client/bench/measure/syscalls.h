// Counting system calls of one thread, by ptrace: not assumed, counted.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace tessera::cli::bench {

// Runs a program and counts the system calls of its main thread between MarkBegin and MarkEnd.
// UNAVAILABLE where this system does not allow tracing.
struct CountedRun {
  std::uint64_t calls = 0;
  std::vector<std::uint64_t> numbers;  // of the calls, in order; at most 64
};
absl::StatusOr<CountedRun> CountSystemCalls(const std::vector<std::string>& command);

// In the program that is counted: harmless calls that the tracer knows by their argument.
void MarkBegin();
void MarkEnd();

}  // namespace tessera::cli::bench
