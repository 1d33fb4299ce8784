// tessera: the command line for operators and engineers.

#include <cstdio>
#include <string_view>
#include <vector>

#include "client/cli/command.h"
#include "daemon/base/did_you_mean.h"
#include "daemon/base/version.h"

namespace tessera::cli {
namespace {

constexpr Command kCommands[] = {
    {"status", "show the memory, tenants, sessions and sequences of a daemon", RunStatus},
    {"top", "show the same live, with rates", RunTop},
    {"describe", "show one sequence lane by lane", RunDescribe},
    {"policies", "list policy terms and their options", RunPolicies},
    {"policy", "change the policy of a sequence", RunPolicy},
    {"compress", "compress what a sequence holds now, and wait", RunCompress},
    {"prefixes", "list published prefixes", RunPrefixes},
    {"offload", "move a sequence to the host tier", RunOffload},
    {"restore", "move an offloaded sequence back to the pool", RunRestore},
    {"evict", "free sequences or published prefixes", RunEvict},
    {"drain", "refuse new sessions, and exit when the current ones end", RunDrain},
    {"health", "exit with 0 if a daemon is healthy, for probes", RunHealth},
    {"worker", "run a synthetic worker that checks every result", RunWorker},
    {"generate", "continue a text with a model", RunGenerate},
    {"eval", "measure how policies change a toy model's answers", RunEval},
    {"bench", "run a benchmark; 'tessera bench --help' lists them", RunBench},
};

int Usage(std::FILE* out, int code) {
  std::fprintf(out, "tessera %.*s\n\nUsage: tessera COMMAND [flags]\n\n",
               static_cast<int>(Version().size()), Version().data());
  for (const Command& command : kCommands) {
    std::fprintf(out, "  %-8.*s  %.*s\n", static_cast<int>(command.name.size()),
                 command.name.data(), static_cast<int>(command.summary.size()),
                 command.summary.data());
  }
  std::fprintf(out, "\nRun 'tessera COMMAND --help' for the flags of a command.\n");
  return code;
}

int Main(int argc, char** argv) {
  const std::vector<std::string_view> args(argv + 1, argv + argc);
  if (args.empty()) return Usage(stderr, 2);
  if (args[0] == "--help" || args[0] == "-h" || args[0] == "help") return Usage(stdout, 0);
  if (args[0] == "--version") {
    std::printf("%.*s\n", static_cast<int>(Version().size()), Version().data());
    return 0;
  }
  for (const Command& command : kCommands) {
    if (command.name == args[0]) return command.run(std::span(args).subspan(1));
  }
  std::vector<std::string_view> names;
  for (const Command& command : kCommands) names.push_back(command.name);
  std::fprintf(stderr, "tessera: unknown command \"%.*s\"%s\n\n", static_cast<int>(args[0].size()),
               args[0].data(), DidYouMean(args[0], names).c_str());
  return Usage(stderr, 2);
}

}  // namespace
}  // namespace tessera::cli

int main(int argc, char** argv) { return tessera::cli::Main(argc, argv); }
