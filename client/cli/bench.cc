#include "client/bench/bench.h"

#include <unistd.h>

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
    {"attend", "packed and selected attention against dense, dense against a plain read",
     RunAttend},
    {"compaction", "what background compaction saves, and what it costs whoever decodes meanwhile",
     RunCompaction},
    {"fidelity", "what each part of packing is worth, in attention that comes out right",
     RunFidelity},
    {"gpu", "the kernels on a GPU, against copying what they read and against dense attention",
     RunGpu},
    {"overhead", "what the daemon adds where the kernel costs nothing", RunOverhead},
    {"policies", "what each policy keeps of attention, at equal budgets, through a daemon",
     RunPolicies},
    {"pressure", "what becomes of throughput when workers hold more than the pool", RunPressure},
    {"scale", "what a sequence's life costs while few or many others live", RunScale},
    {"serve", "a model that decodes through a daemon, against the same with a cache of its own",
     RunServe},
    {"sharing", "what a published head saves those who fork it: memory, and time", RunSharing},
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
  return RunWithArguments(
      Flags(Concat("Usage: tessera bench NAME [--quick] [--json]\n\n"
                   "Figures are ratios measured in one run; absolute times differ by machine.\n\n",
                   bench::List()),
            {{"quick", "", "finish within a minute on two cores", ""},
             {"json", "", "one JSON object instead of the table", ""},
             {"address", "ADDRESS", "for decode-loop and sharing-worker: the daemon", ""},
             {"steps", "N", "for decode-loop: steps", "1000"},
             {"threads", "N", "threads of the kernels; 0: one per core", "0"},
             {"sequences", "N", "for serve: in each worker's batch", "16"},
             {"tokens", "N",
              "of each prompt; serve, 1024 unless given; policies, 8192; sharing, 65536", ""},
             {"layers", "N", "of the model; for scale and sharing, 32 unless given", ""},
             {"workers", "N", "for serve: each a thread with a session", "1"},
             {"seed", "N", "of the rows that fidelity, policies and strategy generate", "1"}}),
      args, [](const Flags& flags) -> absl::Status {
        const absl::StatusOr<bench::Options> options = bench::OptionsOf(flags);
        if (!options.ok()) return options.status();
        if (flags.positional().size() != 1) {
          return absl::InvalidArgumentError(Concat("name one benchmark:\n", bench::List()));
        }
        // Not a benchmark: the program whose system calls `overhead` counts.
        if (flags.positional()[0] == "decode-loop") {
          absl::StatusOr<std::uint64_t> steps = flags.Number("steps", 1, 1'000'000);
          return steps.ok() ? bench::RunDecodeLoop(flags.Get("address"), *steps) : steps.status();
        }
        // Likewise: the processes that `sharing` starts.
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
        return absl::InvalidArgumentError(
            Concat("no benchmark \"", flags.positional()[0], "\"; there are:\n", bench::List()));
      });
}

}  // namespace tessera::cli
