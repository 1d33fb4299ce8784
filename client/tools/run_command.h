// The frame of every subcommand: parses flags, prints help and errors, sets the exit status.
#pragma once

#include <functional>
#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "client/tools/command_spec.h"
#include "client/tools/flags.h"

namespace tessera::cli {

// Parses the arguments, answers --help, or runs `act` and prints its error. Returns the exit
// status: 0 success, 1 failure, 2 wrong usage.
int RunCommand(const CommandSpec& spec, std::span<const std::string_view> args,
               const std::function<absl::Status(const Flags& flags)>& act);

}  // namespace tessera::cli
