// What a subcommand is for and what it takes: the source of its --help, of the manual page and of
// the shell completion.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/tools/connection.h"
#include "client/tools/flags.h"

namespace tessera::cli {

struct Argument {
  std::string name;  // "SEQUENCE"
  std::string hint;  // what to do about a missing one: "'tessera status' lists sequences"
  bool required = true;
  bool repeats = false;  // one or more; the last argument only
};

struct CommandSpec {
  std::string name;     // "describe", "bench serve"
  std::string summary;  // one line without a full stop
  // Lines, each ended by "\n". Help fills them to 80 columns, except those that begin with two
  // spaces; empty lines separate paragraphs.
  std::string description;
  std::vector<Argument> arguments = {};
  std::vector<std::string> examples = {};  // commands
  std::vector<Flags::Spec> flags = {};     // its own
  Connects connects = Connects::kToDaemon;
  bool attaches = false;     // takes the token of a tenant
  std::string closing = {};  // likewise, after the examples
};

// Its own flags, then those of the connection.
std::vector<Flags::Spec> AllFlags(const CommandSpec& spec);

// "tessera policy SEQUENCE POLICY [flags]"
std::string Synopsis(const CommandSpec& spec);

// The output of --help.
std::string HelpText(const CommandSpec& spec);

// The output of `tessera help connection`.
std::string ConnectionHelpText();

// One line per flag, wrapped at 80 columns. Internal flags are left out.
std::string FlagLines(const std::vector<Flags::Spec>& flags);

// INVALID_ARGUMENT names the argument that is missing, or the first that is too many.
absl::Status CheckArguments(const CommandSpec& spec, const std::vector<std::string>& given);

}  // namespace tessera::cli
