// Parses the command line. Flags override the fields of the configuration file.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/platform/prepare_directory.h"
#include "tessera/v1/config.pb.h"

namespace tessera::config {

struct Flags {
  enum class Action {
    kRun,
    kCheckConfig,
    kPrintConfig,
    kPrintPolicies,
    kPrepareDirectory,
    kHelp,
    kVersion
  };
  Action action = Action::kRun;
  std::optional<std::string> config_file;
  // Has only the fields that flags set; MergeFlags applies it to another message.
  tessera::v1::DaemonConfig overrides;
  DirectoryRequest directory;  // for kPrepareDirectory
};

// Accepts "--flag=value" and "--flag value"; `args` excludes the program's name. INVALID_ARGUMENT
// names the argument. The first of --help, --version and --print-policies ends parsing.
absl::StatusOr<Flags> ParseFlags(std::span<const std::string_view> args);

// Applies the flags to `message`. A list given by flags (--listen) replaces the file's list.
void MergeFlags(const tessera::v1::DaemonConfig& overrides, tessera::v1::DaemonConfig& message);

// The names of the fields that are set in `overrides`.
std::vector<std::string> FieldsOf(const tessera::v1::DaemonConfig& overrides);

// A flag as help texts show it.
struct FlagHelp {
  std::string flag;  // "--listen=ADDRESS"
  std::string help;  // with its default
};
// Every flag, in the order of --help.
std::vector<FlagHelp> FlagTable();

// The output of --help: every flag with its default.
std::string HelpText();

}  // namespace tessera::config
