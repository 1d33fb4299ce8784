// The list of commands.

#include "client/cli/command.h"

namespace tessera::cli {

namespace {

constexpr Command kWatch[] = {{StatusSpec, RunStatus},     {TopSpec, RunTop},
                              {DescribeSpec, RunDescribe}, {PrefixesSpec, RunPrefixes},
                              {HealthSpec, RunHealth},     {DoctorSpec, RunDoctor}};
constexpr Command kOperate[] = {{PolicySpec, RunPolicy},   {CompressSpec, RunCompress},
                                {OffloadSpec, RunOffload}, {RestoreSpec, RunRestore},
                                {EvictSpec, RunEvict},     {ReloadSpec, RunReload},
                                {DrainSpec, RunDrain}};
constexpr Command kPolicies[] = {{PoliciesSpec, RunPolicies}, {ExplainSpec, RunExplain}};
constexpr Command kTry[] = {{WorkerSpec, RunWorker},
                            {GenerateSpec, RunGenerate},
                            {EvalSpec, RunEval},
                            {CalibrateSpec, RunCalibrate},
                            {BenchSpec, RunBench}};
constexpr Command kMore[] = {{HelpSpec, RunHelp}, {CompletionSpec, RunCompletion}};

constexpr CommandGroup kGroups[] = {{"Watch a daemon", kWatch},
                                    {"Operate a daemon", kOperate},
                                    {"Choose a policy (no daemon needed)", kPolicies},
                                    {"Try and measure", kTry},
                                    {"More", kMore}};

}  // namespace

std::span<const CommandGroup> CommandGroups() { return kGroups; }

const Command* FindCommand(std::string_view name) {
  for (const CommandGroup& group : kGroups) {
    for (const Command& command : group.commands) {
      if (command.spec().name == name) return &command;
    }
  }
  return nullptr;
}

}  // namespace tessera::cli
