#include "client/cli/program.h"

#include <grpc/support/log.h>

#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "client/cli/command.h"
#include "client/cli/help.h"
#include "client/tools/environment.h"
#include "client/tools/output.h"
#include "daemon/base/did_you_mean.h"
#include "daemon/base/strings.h"
#include "daemon/base/version.h"

namespace tessera::cli {
namespace {

// gRPC's own lines repeat what the command's error says. Its variable turns them on.
void SilenceGrpc() {
  if (!ReadEnvironment("GRPC_VERBOSITY").empty()) return;
  gpr_set_log_function([](gpr_log_func_args*) {});
}

int PrintVersion() {
  const absl::Status status = Print(Concat("tessera ", Version(), "\n"));
  if (status.ok()) return 0;
  if (!absl::IsCancelled(status)) {
    std::fprintf(stderr, "tessera: %s\n", std::string(AsStringView(status.message())).c_str());
  }
  return 1;
}

}  // namespace

int RunProgram(int argc, char** argv) {
  GuardStandardFiles();
  SilenceGrpc();
  const std::vector<std::string_view> args(argv + 1, argv + argc);
  if (args.empty()) {
    std::fputs(Overview().c_str(), stderr);
    return 2;
  }
  const std::span<const std::string_view> rest = std::span(args).subspan(1);
  if (args[0] == "--help" || args[0] == "-h") return RunHelp(rest);
  if (args[0] == "--version") return PrintVersion();
  if (const Command* const command = FindCommand(args[0])) return command->run(rest);
  const std::vector<std::string> names = CommandNames();
  const std::vector<std::string_view> words(names.begin(), names.end());
  std::fprintf(stderr, "tessera: unknown command %s%s; 'tessera help' lists the commands\n",
               Quoted(args[0]).c_str(), DidYouMean(args[0], words).c_str());
  return 2;
}

}  // namespace tessera::cli
