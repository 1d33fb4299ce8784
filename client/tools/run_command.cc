#include "client/tools/run_command.h"

#include <cstdio>
#include <string>

#include "client/tools/output.h"
#include "daemon/base/strings.h"

namespace tessera::cli {

int RunCommand(const CommandSpec& spec, std::span<const std::string_view> args,
               const std::function<absl::Status(const Flags& flags)>& act) {
  Flags flags(AllFlags(spec));
  absl::Status status = flags.Parse(args);
  if (status.ok() && flags.help_asked()) {
    status = Print(HelpText(spec));
  } else {
    if (status.ok()) status = CheckArguments(spec, flags.positional());
    if (status.ok()) status = act(flags);
  }
  if (status.ok()) return 0;
  if (absl::IsCancelled(status)) return 1;  // the reader of the output knows
  std::fprintf(stderr, "tessera %s: %s\n", spec.name.c_str(),
               std::string(AsStringView(status.message())).c_str());
  return absl::IsInvalidArgument(status) ? 2 : 1;
}

}  // namespace tessera::cli
