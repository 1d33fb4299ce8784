// The command line, laid over the message that the file gave.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "tessera/v1/config.pb.h"

namespace tessera::config {

struct Flags {
  enum class Action { kRun, kPrintConfig, kPrintPolicies, kHelp, kVersion };
  Action action = Action::kRun;
  std::optional<std::string> config_file;
  // Only the fields that flags set; MergeFlags lays it over another message.
  tessera::v1::DaemonConfig overrides;
};

// `args` without the program's name. "--flag=value" or "--flag value". INVALID_ARGUMENT names the
// argument. The first of --help, --version and --print-policies wins over everything after it.
absl::StatusOr<Flags> ParseFlags(std::span<const std::string_view> args);

// A list that flags give (--listen) replaces the file's list.
void MergeFlags(const tessera::v1::DaemonConfig& overrides, tessera::v1::DaemonConfig& message);

// What --help prints: every flag with its default.
std::string HelpText();

}  // namespace tessera::config
