// The frame of every subcommand: parses flags, prints help and errors, sets the exit status.
#pragma once

#include <cstdio>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "client/tools/flags.h"
#include "daemon/base/strings.h"

namespace tessera::cli {

// Parses the arguments, answers --help, or runs `act(flags)` and prints its error. Returns the exit
// status: 0 success, 1 failure, 2 wrong usage.
template <typename Act>
int RunWithArguments(Flags flags, std::span<const std::string_view> args, Act act) {
  if (absl::Status status = flags.Parse(args); !status.ok()) {
    std::fprintf(stderr, "tessera: %s\n", std::string(AsStringView(status.message())).c_str());
    return 2;
  }
  if (flags.help_asked()) {
    std::fputs(flags.Help().c_str(), stdout);
    return 0;
  }
  const absl::Status status = act(flags);
  if (status.ok()) return 0;
  std::fprintf(stderr, "tessera: %s\n", std::string(AsStringView(status.message())).c_str());
  return absl::IsInvalidArgument(status) ? 2 : 1;
}

// The same for a command without positional arguments.
template <typename Act>
int RunWithFlags(Flags flags, std::span<const std::string_view> args, Act act) {
  return RunWithArguments(std::move(flags), args, [&act](const Flags& parsed) -> absl::Status {
    if (parsed.positional().empty()) return act(parsed);
    return absl::InvalidArgumentError(Concat("unexpected argument \"", parsed.positional()[0],
                                             "\"; this command takes flags only"));
  });
}

}  // namespace tessera::cli
