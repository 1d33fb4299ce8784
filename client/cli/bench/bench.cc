#include "client/cli/bench/bench.h"

#include <unistd.h>

#include <cstdio>
#include <limits>

#include "client/cli/bench/decode_loop.h"
#include "client/cli/command.h"
#include "client/cli/run.h"

namespace tessera::cli {

namespace bench {
namespace {
constexpr Benchmark kBenchmarks[] = {
    {"attend", "packed and selected attention against dense, dense against a plain read",
     RunAttend},
    {"compaction", "what background compaction saves, and what it costs whoever decodes meanwhile",
     RunCompaction},
    {"fidelity", "what each part of packing is worth, in attention that comes out right",
     RunFidelity},
    {"overhead", "what the daemon adds where the kernel costs nothing", RunOverhead},
    {"policies", "what each policy keeps of attention, at equal budgets, through a daemon",
     RunPolicies},
    {"serve", "a model that decodes through a daemon, against the same with a cache of its own",
     RunServe},
    {"strategy", "what it costs to choose a strategy, and to pack a full tile", RunStrategy},
};

std::string List() {
  std::string out;
  for (const Benchmark& benchmark : kBenchmarks) {
    Append(out, "  ", benchmark.name, std::string(12 - benchmark.name.size(), ' '), benchmark.what,
           "\n");
  }
  return out;
}
}  // namespace

void Progress(std::string_view text) {
  const bool screen = ::isatty(STDERR_FILENO) != 0;
  std::fprintf(stderr, screen ? "\r\x1b[K%.*s" : "%.*s\n", static_cast<int>(text.size()),
               text.data());
  std::fflush(stderr);
}

void ProgressDone() {
  if (::isatty(STDERR_FILENO) != 0) std::fputs("\r\x1b[K", stderr);
}

}  // namespace bench

int RunBench(std::span<const std::string_view> args) {
  return RunWithFlags(
      Flags(Concat("Usage: tessera bench NAME [--quick] [--json]\n\n"
                   "Figures are ratios measured in one run; absolute times differ by machine.\n\n",
                   bench::List()),
            {{"quick", "", "finish within a minute on two cores", ""},
             {"json", "", "one JSON object instead of the table", ""},
             {"address", "ADDRESS", "for decode-loop: the daemon", ""},
             {"steps", "N", "for decode-loop: steps", "1000"},
             {"threads", "N", "threads of the kernels; 0: one per core", "0"},
             {"sequences", "N", "for serve: in each worker's batch", "16"},
             {"tokens", "N", "for serve: of each prompt", "1024"},
             {"workers", "N", "for serve: each a thread with a session", "1"},
             {"seed", "N", "of the rows that fidelity, policies and strategy generate", "1"}}),
      args, [](const Flags& flags) -> absl::Status {
        absl::StatusOr<std::uint64_t> threads = flags.Number("threads", 0, 1024);
        if (!threads.ok()) return threads.status();
        absl::StatusOr<std::uint64_t> seed =
            flags.Number("seed", 0, std::numeric_limits<std::uint64_t>::max());
        if (!seed.ok()) return seed.status();
        absl::StatusOr<std::uint64_t> sequences = flags.Number("sequences", 1, 256);
        if (!sequences.ok()) return sequences.status();
        absl::StatusOr<std::uint64_t> tokens = flags.Number("tokens", 128, 2048);
        if (!tokens.ok()) return tokens.status();
        absl::StatusOr<std::uint64_t> workers = flags.Number("workers", 1, 64);
        if (!workers.ok()) return workers.status();
        if (flags.positional().size() != 1) {
          return absl::InvalidArgumentError(Concat("name one benchmark:\n", bench::List()));
        }
        // Not a benchmark: the program whose system calls `overhead` counts.
        if (flags.positional()[0] == "decode-loop") {
          absl::StatusOr<std::uint64_t> steps = flags.Number("steps", 1, 1'000'000);
          return steps.ok() ? bench::RunDecodeLoop(flags.Get("address"), *steps) : steps.status();
        }
        for (const bench::Benchmark& benchmark : bench::kBenchmarks) {
          if (benchmark.name != flags.positional()[0]) continue;
          absl::StatusOr<bench::Report> report =
              benchmark.run({.quick = flags.Has("quick"),
                             .threads = static_cast<std::uint32_t>(*threads),
                             .seed = *seed,
                             .sequences = static_cast<std::uint32_t>(*sequences),
                             .tokens = static_cast<std::uint32_t>(*tokens),
                             .workers = static_cast<std::uint32_t>(*workers)});
          bench::ProgressDone();
          if (!report.ok()) return report.status();
          std::fputs((flags.Has("json") ? report->Json() : report->Text()).c_str(), stdout);
          return absl::OkStatus();
        }
        return absl::InvalidArgumentError(
            Concat("no benchmark \"", flags.positional()[0], "\"; there are:\n", bench::List()));
      });
}

}  // namespace tessera::cli
