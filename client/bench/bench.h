// The benchmarks of `tessera bench`.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "absl/status/statusor.h"
#include "client/tools/report.h"

namespace tessera::cli::bench {

struct Options {
  bool quick = false;         // finish within a minute on two cores
  std::uint32_t threads = 0;  // kernel threads; 0: one per core
  std::uint64_t seed = 1;     // of generated rows and prompts
  // serve only.
  std::uint32_t sequences = 16;  // per worker
  std::uint32_t workers = 1;
  // Unset: the benchmark's default.
  std::optional<std::uint32_t> tokens;  // per prompt
  std::optional<std::uint32_t> layers;  // of the model
};

struct Benchmark {
  std::string_view name;
  std::string_view what;     // one line of the list
  std::string_view about;    // how it measures, lines of the help page
  std::string_view rows;     // its rows, lines of the help page
  std::string_view example;  // a command
  std::string_view flags;    // names of the flags it takes beside the common ones, by spaces
  std::string_view tokens;   // help of --tokens
  std::string_view layers;   // help of --layers
  absl::StatusOr<Report> (*run)(const Options& options);
};

// By name.
std::span<const Benchmark> Benchmarks();
// nullptr if there is none.
const Benchmark* FindBenchmark(std::string_view name);

absl::StatusOr<Report> RunAttend(const Options& options);
absl::StatusOr<Report> RunCompaction(const Options& options);
absl::StatusOr<Report> RunFidelity(const Options& options);
absl::StatusOr<Report> RunGpu(const Options& options);
absl::StatusOr<Report> RunOverhead(const Options& options);
absl::StatusOr<Report> RunPolicies(const Options& options);
absl::StatusOr<Report> RunPressure(const Options& options);
absl::StatusOr<Report> RunScale(const Options& options);
absl::StatusOr<Report> RunServe(const Options& options);
absl::StatusOr<Report> RunSharing(const Options& options);
absl::StatusOr<Report> RunStrategy(const Options& options);

// Prints a line of progress on stderr. On a terminal the next line overwrites it, and ProgressDone
// clears it.
void Progress(std::string_view text);
void ProgressDone();

}  // namespace tessera::cli::bench
