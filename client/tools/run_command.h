// What every subcommand does before and after its work: flags, help, errors.
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

// Parses, answers --help, runs `act(flags)` and prints its error. Exit status 0, 1 or 2 (usage).
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

// The same for what takes nothing but flags.
template <typename Act>
int RunWithFlags(Flags flags, std::span<const std::string_view> args, Act act) {
  return RunWithArguments(std::move(flags), args, [&act](const Flags& parsed) -> absl::Status {
    if (parsed.positional().empty()) return act(parsed);
    return absl::InvalidArgumentError(
        Concat("\"", parsed.positional()[0], "\" is no flag, and it takes nothing else"));
  });
}

}  // namespace tessera::cli
