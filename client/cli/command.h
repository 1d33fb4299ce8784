// The subcommands of `tessera`. Each has a specification, which --help, the manual page and the
// completion print, and a function that runs it.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "client/gpu/gpu.h"
#include "client/tools/command_spec.h"

namespace tessera::cli {

namespace bench {
struct Benchmark;
}

struct Command {
  CommandSpec (*spec)();
  // Returns the exit status; prints its own errors.
  int (*run)(std::span<const std::string_view> args);
};

// Commands with a common purpose, in the order of the overview.
struct CommandGroup {
  std::string_view title;
  std::span<const Command> commands;
};
std::span<const CommandGroup> CommandGroups();
// Null: there is none.
const Command* FindCommand(std::string_view name);

CommandSpec StatusSpec();
int RunStatus(std::span<const std::string_view> args);
CommandSpec TopSpec();
int RunTop(std::span<const std::string_view> args);
CommandSpec DescribeSpec();
int RunDescribe(std::span<const std::string_view> args);
CommandSpec PrefixesSpec();
int RunPrefixes(std::span<const std::string_view> args);
CommandSpec HealthSpec();
int RunHealth(std::span<const std::string_view> args);
CommandSpec DoctorSpec();
int RunDoctor(std::span<const std::string_view> args);

CommandSpec PolicySpec();
int RunPolicy(std::span<const std::string_view> args);
CommandSpec CompressSpec();
int RunCompress(std::span<const std::string_view> args);
CommandSpec OffloadSpec();
int RunOffload(std::span<const std::string_view> args);
CommandSpec RestoreSpec();
int RunRestore(std::span<const std::string_view> args);
CommandSpec EvictSpec();
int RunEvict(std::span<const std::string_view> args);
CommandSpec DrainSpec();
int RunDrain(std::span<const std::string_view> args);
CommandSpec ReloadSpec();
int RunReload(std::span<const std::string_view> args);

CommandSpec PoliciesSpec();
int RunPolicies(std::span<const std::string_view> args);
CommandSpec ExplainSpec();
int RunExplain(std::span<const std::string_view> args);

CommandSpec WorkerSpec();
int RunWorker(std::span<const std::string_view> args);
// RunWorker on the given GPUs, for tests.
int RunWorkerOn(const client::GpuPlatform& gpus, std::span<const std::string_view> args);
CommandSpec GenerateSpec();
int RunGenerate(std::span<const std::string_view> args);
CommandSpec EvalSpec();
int RunEval(std::span<const std::string_view> args);
CommandSpec CalibrateSpec();
int RunCalibrate(std::span<const std::string_view> args);
CommandSpec BenchSpec();
CommandSpec BenchSpecOf(const bench::Benchmark& benchmark);
int RunBench(std::span<const std::string_view> args);

CommandSpec HelpSpec();
int RunHelp(std::span<const std::string_view> args);
CommandSpec CompletionSpec();
int RunCompletion(std::span<const std::string_view> args);

}  // namespace tessera::cli
