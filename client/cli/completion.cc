// tessera completion: a shell script that completes command lines.

#include <string>
#include <string_view>
#include <vector>

#include "client/bench/bench.h"
#include "client/cli/command.h"
#include "client/cli/help.h"
#include "client/tools/output.h"
#include "client/tools/run_command.h"
#include "daemon/base/strings.h"

namespace tessera::cli {

namespace {

// The flags of a command as words to complete: "--json --sequences=".
std::string FlagWords(const CommandSpec& spec) {
  std::string words;
  for (const Flags::Spec& flag : AllFlags(spec)) {
    if (flag.kind == FlagKind::kInternal) continue;
    Append(words, words.empty() ? "" : " ", "--", flag.name, flag.value.empty() ? "" : "=");
  }
  return words + (words.empty() ? "--help" : " --help");
}

// The words that the first argument may be.
std::string ArgumentWords(const CommandSpec& spec) {
  std::string words;
  if (spec.name == "bench") {
    for (const bench::Benchmark& benchmark : bench::Benchmarks()) {
      Append(words, words.empty() ? "" : " ", benchmark.name);
    }
  }
  if (spec.name == "completion") words = "bash";
  if (spec.name == "help") {
    words = "connection manual";
    for (const std::string& name : CommandNames()) Append(words, " ", name);
  }
  return words;
}

constexpr std::string_view kHead =
    R"(# bash completion for tessera: written by 'tessera completion bash'.

_tessera() {
  local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}"
  local flags="" arguments="" flag=""
  COMPREPLY=()
  # bash splits at '=': "--model", "=", "fo".
  if [[ $previous == "=" && COMP_CWORD -ge 2 ]]; then
    flag="${COMP_WORDS[COMP_CWORD-2]}"
  elif [[ $current == "=" ]]; then
    flag="$previous" current=""
  fi
  case "$flag" in
    --baseline|--report|--state|--tls-ca|--tls-certificate|--tls-key)
      COMPREPLY=($(compgen -f -- "$current"))
      return ;;
    --model)
      COMPREPLY=($(compgen -d -- "$current") $(compgen -f -X '!*.json' -- "$current"))
      return ;;
    --transport)
      COMPREPLY=($(compgen -W "mapped rpc" -- "$current"))
      return ;;
    --*)
      return ;;
  esac
  if [[ COMP_CWORD -eq 1 ]]; then
    COMPREPLY=($(compgen -W "$_tessera_commands --help --version" -- "$current"))
    return
  fi
  case "${COMP_WORDS[1]}" in
)";

constexpr std::string_view kTail = R"(  esac
  if [[ $current == -* ]]; then
    COMPREPLY=($(compgen -W "$flags" -- "$current"))
    # No space after a flag that takes a value.
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace 2> /dev/null
  else
    COMPREPLY=($(compgen -W "$arguments" -- "$current"))
  fi
  return 0
}

complete -F _tessera tessera
)";

absl::Status PrintCompletion(const Flags& flags) {
  if (flags.positional()[0] == "bash") return Print(BashCompletion());
  return absl::InvalidArgumentError(
      Concat("no completion for ", Quoted(flags.positional()[0]), "; there is one for bash"));
}

}  // namespace

std::string BashCompletion() {
  std::string commands;
  std::string cases;
  for (const std::string& name : CommandNames()) {
    const CommandSpec spec = FindCommand(name)->spec();
    Append(commands, commands.empty() ? "" : " ", name);
    Append(cases, "    ", name, ")\n      flags=\"", FlagWords(spec), "\"\n");
    const std::string arguments = ArgumentWords(spec);
    if (!arguments.empty()) Append(cases, "      arguments=\"", arguments, "\"\n");
    cases += "      ;;\n";
  }
  return Concat("_tessera_commands=\"", commands, "\"\n", kHead, cases, kTail);
}

CommandSpec CompletionSpec() {
  return {
      .name = "completion",
      .summary = "print a script that completes command lines in bash",
      .description =
          "Prints a script that completes commands, flags and benchmarks. Packages install it;\n"
          "without one, add the example to ~/.bashrc.\n",
      .arguments = {{.name = "SHELL", .hint = "the shell is bash"}},
      .examples = {"source <(tessera completion bash)"},
      .connects = Connects::kNowhere};
}

int RunCompletion(std::span<const std::string_view> args) {
  return RunCommand(CompletionSpec(), args, PrintCompletion);
}

}  // namespace tessera::cli
