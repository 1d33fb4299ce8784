// Writes the manual page or the bash completion of tesserad from its table of flags, at build time.

#include <cstdio>
#include <string>
#include <string_view>

#include "client/cli/manual.h"
#include "daemon/base/strings.h"
#include "daemon/config/flags.h"

namespace tessera::cli {
namespace {

std::string DaemonManual() {
  Manual manual("tesserad", 8, "KV-cache daemon for the inference workers of a node");
  manual.Section("SYNOPSIS");
  manual.Paragraphs("tesserad [--config FILE] [flags]");
  manual.Section("DESCRIPTION");
  manual.Paragraphs(
      "Keeps the KV cache of the inference workers of a node: it shares prefixes among them,\n"
      "compresses sequences by policy, and moves idle ones to host memory. Workers reach it "
      "through\n"
      "a Unix socket and mapped memory, or through gRPC over TCP.\n\n"
      "Flags override the fields of the configuration file. Sizes are bytes, or as in 512MiB, "
      "8GiB,\n"
      "1.5G;\n"
      "times are milliseconds, or as in 500ms, 10s, 5m.");
  manual.Section("FLAGS");
  for (const config::FlagHelp& flag : config::FlagTable()) manual.Item(flag.flag, flag.help);
  manual.Section("SIGNALS");
  manual.Item("SIGTERM, SIGINT",
              "Drain: refuse new sessions, and exit when the current ones have ended or the drain "
              "limit has passed. A second one stops the daemon at once.");
  manual.Item(
      "SIGHUP",
      "Reload: read the configuration anew, and apply what needs no restart, all or nothing.");
  manual.Section("SEE ALSO");
  manual.Paragraphs("tessera(1)");
  return manual.text();
}

std::string DaemonCompletion() {
  std::string flags;
  std::string files;
  for (const config::FlagHelp& flag : config::FlagTable()) {
    const std::string name = flag.flag.substr(0, flag.flag.find_first_of("=,"));
    const bool has_value = flag.flag.find('=') != std::string::npos;
    Append(flags, flags.empty() ? "" : " ", name, has_value ? "=" : "");
    if (flag.flag.ends_with("=FILE")) Append(files, files.empty() ? "" : "|", name);
  }
  return Concat(
      "# bash completion for tesserad: written from its table of flags.\n\n"
      "_tesserad() {\n"
      "  local current=\"${COMP_WORDS[COMP_CWORD]}\" flag=\"${COMP_WORDS[COMP_CWORD-1]}\"\n"
      "  COMPREPLY=()\n"
      "  # bash splits at '=': \"--config\", \"=\", \"fi\".\n"
      "  [[ $flag == \"=\" && COMP_CWORD -ge 2 ]] && flag=\"${COMP_WORDS[COMP_CWORD-2]}\"\n"
      "  [[ $current == \"=\" ]] && current=\"\"\n"
      "  case \"$flag\" in\n    ",
      files,
      ")\n      COMPREPLY=($(compgen -f -- \"$current\"))\n      return ;;\n  esac\n"
      "  COMPREPLY=($(compgen -W \"",
      flags,
      "\" -- \"$current\"))\n"
      "  [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace 2> /dev/null\n"
      "  return 0\n"
      "}\n\n"
      "complete -F _tesserad tesserad\n");
}

}  // namespace
}  // namespace tessera::cli

int main(int argc, char** argv) {
  const std::string_view what = argc == 2 ? argv[1] : "";
  if (what != "manual" && what != "completion") {
    std::fputs("usage: tesserad_documents manual|completion\n", stderr);
    return 2;
  }
  const std::string text =
      what == "manual" ? tessera::cli::DaemonManual() : tessera::cli::DaemonCompletion();
  return std::fputs(text.c_str(), stdout) < 0 || std::fflush(stdout) != 0 ? 1 : 0;
}
