// tessera: the operator's and the curious engineer's command.

#include <cstdio>
#include <string_view>
#include <vector>

#include "client/cli/command.h"
#include "daemon/base/did_you_mean.h"
#include "daemon/base/version.h"

namespace tessera::cli {
namespace {

constexpr Command kCommands[] = {
    {"status", "what a daemon holds, once", RunStatus},
    {"top", "the same, live", RunTop},
    {"describe", "one sequence, lane by lane", RunDescribe},
    {"policies", "what a policy may say", RunPolicies},
    {"policy", "give a sequence another policy", RunPolicy},
    {"compress", "have a sequence compress what it holds", RunCompress},
    {"prefixes", "published prefixes, and who uses them", RunPrefixes},
    {"offload", "move a sequence to host memory until it is needed", RunOffload},
    {"restore", "bring a sequence back before it is needed", RunRestore},
    {"evict", "free a sequence, whoever owns it, or a prefix", RunEvict},
    {"drain", "let a daemon finish and exit", RunDrain},
    {"worker", "a small worker that decodes through a daemon and checks every result", RunWorker},
    {"generate", "a model goes on with a text", RunGenerate},
    {"eval", "whether a small model still answers from what policies keep", RunEval},
    {"bench", "measure; 'tessera bench' lists what", RunBench},
};

int Usage(std::FILE* out, int code) {
  std::fprintf(out, "tessera %.*s\n\nUsage: tessera COMMAND [flags]\n\n",
               static_cast<int>(Version().size()), Version().data());
  for (const Command& command : kCommands) {
    std::fprintf(out, "  %-8.*s  %.*s\n", static_cast<int>(command.name.size()),
                 command.name.data(), static_cast<int>(command.summary.size()),
                 command.summary.data());
  }
  std::fprintf(out, "\n'tessera COMMAND --help' lists a command's flags.\n");
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
  std::fprintf(stderr, "tessera: no command \"%.*s\"%s\n\n", static_cast<int>(args[0].size()),
               args[0].data(), DidYouMean(args[0], names).c_str());
  return Usage(stderr, 2);
}

}  // namespace
}  // namespace tessera::cli

int main(int argc, char** argv) { return tessera::cli::Main(argc, argv); }
