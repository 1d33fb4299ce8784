#include "client/bench/bench.h"

#include <limits>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "client/bench/earlier_run.h"
#include "client/bench/workload/decode_loop.h"
#include "client/bench/workload/sharing_worker.h"
#include "client/cli/command.h"
#include "client/tools/output.h"
#include "client/tools/run_command.h"
#include "daemon/base/strings.h"

namespace tessera::cli {

namespace bench {
namespace {

constexpr const char* kExitStatus =
    "Exit status: 0 measured, even if a goal was missed (see the column met); 1 the measurement\n"
    "failed; 2 wrong usage.\n";

std::string List() {
  std::string out;
  for (const Benchmark& benchmark : Benchmarks()) {
    Append(out, "  ", benchmark.name, std::string(12 - benchmark.name.size(), ' '), benchmark.what,
           "\n");
  }
  return out;
}

std::vector<Flags::Spec> CommonFlags() {
  return {{"quick", "", "Finish within a minute on two cores.", ""},
          {"json", "", "Print one JSON object instead of the table.", ""},
          {"baseline", "FILE", "Compare with an earlier run: its --json output.", ""}};
}

bool Takes(const Benchmark& benchmark, std::string_view flag) {
  return Concat(" ", benchmark.flags, " ").find(Concat(" ", flag, " ")) != std::string::npos;
}

absl::StatusOr<Options> OptionsOf(const Flags& flags) {
  Options options = {.quick = flags.Has("quick")};
  absl::Status status;
  const auto take = [&](const char* name, std::uint64_t min, std::uint64_t max, auto& into) {
    if (!flags.Declares(name)) return;
    const absl::StatusOr<std::uint64_t> number = flags.Number(name, min, max);
    status.Update(number.status());
    if (number.ok()) into = static_cast<std::remove_reference_t<decltype(into)>>(*number);
  };
  const auto take_given = [&](const char* name, std::uint64_t min, std::uint64_t max,
                              std::optional<std::uint32_t>& into) {
    std::uint32_t number = 0;
    if (!flags.Declares(name) || !flags.Has(name)) return;
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

absl::Status RunOne(const Benchmark& benchmark, const Flags& flags) {
  const absl::StatusOr<Options> options = OptionsOf(flags);
  if (!options.ok()) return options.status();
  std::optional<EarlierRun> earlier;
  if (flags.Has("baseline")) {
    absl::StatusOr<EarlierRun> read = ReadEarlierRun(flags.Get("baseline"), benchmark.name);
    if (!read.ok()) return read.status();
    earlier = *std::move(read);
  }
  const double load_average = LoadAverage();
  absl::StatusOr<Report> report = benchmark.run(*options);
  ProgressDone();
  if (!report.ok()) return report.status();
  report->load_average = load_average;
  report->earlier = std::move(earlier);
  return Print(flags.Has("json") ? report->Json() : report->Text());
}

// Anything but a benchmark.
absl::Status RunInternal(const Flags& flags) {
  const absl::StatusOr<Options> options = OptionsOf(flags);
  if (!options.ok()) return options.status();
  const std::string& name = flags.positional()[0];
  // The child process whose system calls `overhead` counts.
  if (name == "decode-loop") {
    absl::StatusOr<std::uint64_t> steps = flags.Number("steps", 1, 1'000'000);
    return steps.ok() ? RunDecodeLoop(flags.Get("address"), *steps) : steps.status();
  }
  // The child processes of `sharing`.
  if (name == "sharing-worker") {
    return RunSharingWorker(flags.Get("address"), {.layers = options->layers.value_or(1),
                                                   .tokens = options->tokens.value_or(0)});
  }
  return absl::InvalidArgumentError(
      Concat("unknown benchmark ", Quoted(name), "; expected one of:\n", List()));
}

}  // namespace
}  // namespace bench

// Of the command without the name of a benchmark, and of its internal child processes.
CommandSpec BenchSpec() {
  CommandSpec spec = {
      .name = "bench",
      .summary = "run a benchmark; 'tessera bench --help' lists them",
      .description = Concat(
          "Runs one benchmark. Ratios compare rows of one run; absolute times are valid for this\n"
          "machine only. 'tessera bench NAME --help' explains the rows of a benchmark and its own\n"
          "flags.\n\n"
          "Benchmarks:\n",
          bench::List()),
      .arguments = {{.name = "NAME", .hint = "'tessera bench --help' lists the benchmarks"}},
      .examples = {"tessera bench serve --quick", "tessera bench attend --json > before.json",
                   "tessera bench attend --baseline=before.json"},
      .flags = bench::CommonFlags(),
      .connects = Connects::kNowhere,
      .closing = bench::kExitStatus};
  for (const auto& [name, fallback] :
       {std::pair("address", ""), std::pair("steps", "1000"), std::pair("threads", "0"),
        std::pair("sequences", "16"), std::pair("tokens", ""), std::pair("layers", ""),
        std::pair("workers", "1"), std::pair("seed", "1")}) {
    spec.flags.push_back({name, "VALUE", "", fallback, FlagKind::kInternal});
  }
  return spec;
}

CommandSpec BenchSpecOf(const bench::Benchmark& benchmark) {
  CommandSpec spec = {.name = "bench",
                      .summary = std::string(benchmark.what),
                      .description = Concat("Measures: ", benchmark.what, ".\n\n", benchmark.about,
                                            "\nRows:\n", benchmark.rows),
                      .arguments = {{.name = std::string(benchmark.name), .hint = ""}},
                      .examples = {std::string(benchmark.example)},
                      .flags = bench::CommonFlags(),
                      .connects = Connects::kNowhere,
                      .closing = bench::kExitStatus};
  for (Flags::Spec own : std::vector<Flags::Spec>{
           {"threads", "N", "Kernel threads. 0: one per core.", "0"},
           {"sequences", "N", "Sequences in the batch of each worker.", "16"},
           {"tokens", "N", std::string(benchmark.tokens), ""},
           {"layers", "N", std::string(benchmark.layers), ""},
           {"workers", "N", "Workers, each a thread with its own session.", "1"},
           {"seed", "N", "Seed of generated rows and prompts.", "1"}}) {
    if (bench::Takes(benchmark, own.name)) spec.flags.push_back(std::move(own));
  }
  return spec;
}

int RunBench(std::span<const std::string_view> args) {
  // Find the benchmark among the arguments; flags may come before its name.
  Flags general(AllFlags(BenchSpec()));
  static_cast<void>(general.Parse(args));  // errors are reported below
  const bench::Benchmark* const benchmark =
      general.positional().empty() ? nullptr : bench::FindBenchmark(general.positional()[0]);
  if (benchmark == nullptr) return RunCommand(BenchSpec(), args, bench::RunInternal);
  return RunCommand(BenchSpecOf(*benchmark), args,
                    [benchmark](const Flags& flags) { return bench::RunOne(*benchmark, flags); });
}

}  // namespace tessera::cli
