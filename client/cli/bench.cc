#include "client/bench/bench.h"

#include <cstdio>
#include <limits>
#include <optional>
#include <type_traits>

#include "client/bench/workload/decode_loop.h"
#include "client/bench/workload/sharing_worker.h"
#include "client/cli/command.h"
#include "client/tools/run_command.h"
#include "daemon/base/strings.h"

namespace tessera::cli {

namespace bench {
namespace {
constexpr Benchmark kBenchmarks[] = {
    {"attend", "speed of packed and selected attention compared with dense attention", RunAttend},
    {"compaction", "memory that compaction saves, and decode latency while it runs", RunCompaction},
    {"fidelity", "attention error of each part of the packed format, at equal bytes", RunFidelity},
    {"gpu", "speed of the GPU kernels compared with a device copy and dense attention", RunGpu},
    {"overhead", "cost that client and daemon add to a nearly free attention call", RunOverhead},
    {"policies", "attention error of each policy at equal budgets, through a daemon", RunPolicies},
    {"pressure", "throughput while sequences exceed the pool", RunPressure},
    {"scale", "latency of create, append, fork and free with 10 to 1,000 live sequences", RunScale},
    {"serve", "decoding through a daemon compared with a cache in the worker's memory", RunServe},
    {"sharing", "memory and time that one published prefix saves 8 workers", RunSharing},
    {"strategy", "time to compute a strategy and to encode a tile", RunStrategy},
};

std::string List() {
  std::string out;
  for (const Benchmark& benchmark : kBenchmarks) {
    Append(out, "  ", benchmark.name, std::string(12 - benchmark.name.size(), ' '), benchmark.what,
           "\n");
  }
  return out;
}

absl::StatusOr<Options> OptionsOf(const Flags& flags) {
  Options options = {.quick = flags.Has("quick")};
  absl::Status status;
  const auto take = [&](const char* name, std::uint64_t min, std::uint64_t max, auto& into) {
    const absl::StatusOr<std::uint64_t> number = flags.Number(name, min, max);
    status.Update(number.status());
    if (number.ok()) into = static_cast<std::remove_reference_t<decltype(into)>>(*number);
  };
  const auto take_given = [&](const char* name, std::uint64_t min, std::uint64_t max,
                              std::optional<std::uint32_t>& into) {
    std::uint32_t number = 0;
    if (!flags.Has(name)) return;
    take(name, min, max, number);
    into = number;
  };
  take("threads", 0, 1024, options.threads);
  take("seed", 0, std::numeric_limits<std::uint64_t>::max(), options.seed);
  take("sequences", 1, 256, options.sequences);
  take("workers", 1, 64, options.workers);
  take_given("tokens", 128, 64 * 1024, options.tokens);
  take_given("layers", 1, 128, options.layers);
  if (!status.ok()) return status;
  return options;
}
}  // namespace

}  // namespace bench

int RunBench(std::span<const std::string_view> args) {
  return RunWithArguments(
      Flags(Concat("Usage: tessera bench NAME [--quick] [--json]\n\n"
                   "Runs one benchmark. Ratios compare rows of one run; absolute times are valid\n"
                   "for this machine only.\n\n"
                   "Examples:\n"
                   "  tessera bench serve --quick\n"
                   "  tessera bench attend --json\n\n"
                   "Benchmarks:\n",
                   bench::List()),
            {{"quick", "", "Finish within a minute on two cores.", ""},
             {"json", "", "Print one JSON object instead of the table.", ""},
             {"address", "ADDRESS", "Internal: daemon of decode-loop and sharing-worker.", ""},
             {"steps", "N", "Internal: steps of decode-loop.", "1000"},
             {"threads", "N", "Kernel threads. 0: one per core.", "0"},
             {"sequences", "N", "serve: sequences in the batch of each worker.", "16"},
             {"tokens", "N",
              "Tokens per prompt. Defaults: serve 1024, policies 8192, sharing 65536.", ""},
             {"layers", "N", "scale, sharing: layers of the model. Default: 32.", ""},
             {"workers", "N", "serve: workers, each a thread with its own session.", "1"},
             {"seed", "N", "Seed of generated rows and prompts.", "1"}}),
      args, [](const Flags& flags) -> absl::Status {
        const absl::StatusOr<bench::Options> options = bench::OptionsOf(flags);
        if (!options.ok()) return options.status();
        if (flags.positional().size() != 1) {
          return absl::InvalidArgumentError(
              Concat("expected the name of one benchmark:\n", bench::List()));
        }
        // Not a benchmark: the child process whose system calls `overhead` counts.
        if (flags.positional()[0] == "decode-loop") {
          absl::StatusOr<std::uint64_t> steps = flags.Number("steps", 1, 1'000'000);
          return steps.ok() ? bench::RunDecodeLoop(flags.Get("address"), *steps) : steps.status();
        }
        // Not a benchmark: the child processes of `sharing`.
        if (flags.positional()[0] == "sharing-worker") {
          return bench::RunSharingWorker(
              flags.Get("address"),
              {.layers = options->layers.value_or(1), .tokens = options->tokens.value_or(0)});
        }
        for (const bench::Benchmark& benchmark : bench::kBenchmarks) {
          if (benchmark.name != flags.positional()[0]) continue;
          absl::StatusOr<bench::Report> report = benchmark.run(*options);
          bench::ProgressDone();
          if (!report.ok()) return report.status();
          std::fputs((flags.Has("json") ? report->Json() : report->Text()).c_str(), stdout);
          return absl::OkStatus();
        }
        return absl::InvalidArgumentError(Concat("unknown benchmark \"", flags.positional()[0],
                                                 "\"; expected one of:\n", bench::List()));
      });
}

}  // namespace tessera::cli
