// tessera help: the overview, the help of a command, of the connection flags, and the manual page.

#include "client/cli/help.h"

#include <string_view>

#include "client/bench/bench.h"
#include "client/cli/command.h"
#include "client/cli/manual.h"
#include "client/tools/output.h"
#include "client/tools/run_command.h"
#include "daemon/base/did_you_mean.h"
#include "daemon/base/strings.h"
#include "daemon/base/version.h"

namespace tessera::cli {

namespace {

constexpr std::string_view kAbout = "observe and operate tesserad, the KV-cache daemon";

struct Variable {
  std::string_view name;
  std::string_view meaning;
};
constexpr Variable kVariables[] = {
    {"TESSERA_ADDRESS", "Address of the daemon, where --address is not given."},
    {"TESSERA_TOKEN", "Token of the tenant, where --token is not given."},
    {"NO_COLOR", "If not empty: no colours."},
    {"GRPC_VERBOSITY", "If set: gRPC's own log lines are shown on standard error."},
};

constexpr Variable kExitStatus[] = {
    {"0", "Success."},
    {"1", "Failure. A message on standard error says why and what to do next."},
    {"2", "Wrong usage."},
};

std::string TableOf(std::span<const Variable> rows) {
  std::string text;
  for (const Variable& row : rows) {
    std::string name(row.name);
    name.resize(18, ' ');
    Append(text, "  ", name, row.meaning, "\n");
  }
  return text;
}

void AddFlags(const std::vector<Flags::Spec>& flags, Manual& manual) {
  for (const Flags::Spec& flag : flags) {
    if (flag.kind == FlagKind::kInternal) continue;
    std::string help = flag.help;
    if (!flag.fallback.empty()) Append(help, " Default: ", flag.fallback, ".");
    manual.Item(Concat("--", flag.name, flag.value.empty() ? "" : "=", flag.value), help);
  }
}

void AddCommand(const CommandSpec& spec, Manual& manual) {
  manual.Subsection(Synopsis(spec));
  manual.Paragraphs(spec.description);
  AddFlags(spec.flags, manual);
  std::string examples;
  for (const std::string& example : spec.examples) Append(examples, example, "\n");
  manual.Paragraphs(spec.examples.size() == 1 ? "Example:" : "Examples:");
  manual.Verbatim(examples);
}

absl::Status PrintHelp(const Flags& flags) {
  if (flags.positional().empty()) return Print(Overview());
  const std::string& topic = flags.positional()[0];
  if (topic == "connection") return Print(ConnectionHelpText());
  if (topic == "manual") return Print(ManualPage());
  if (topic == "bench" && flags.positional().size() > 1) {
    const bench::Benchmark* const benchmark = bench::FindBenchmark(flags.positional()[1]);
    if (benchmark != nullptr) return Print(HelpText(BenchSpecOf(*benchmark)));
  }
  if (const Command* const command = FindCommand(topic)) return Print(HelpText(command->spec()));
  const std::vector<std::string> names = CommandNames();
  const std::vector<std::string_view> words(names.begin(), names.end());
  return absl::InvalidArgumentError(Concat("no command or topic ", Quoted(topic),
                                           DidYouMean(topic, words),
                                           "; 'tessera help' lists them"));
}

}  // namespace

std::vector<std::string> CommandNames() {
  std::vector<std::string> names;
  for (const CommandGroup& group : CommandGroups()) {
    for (const Command& command : group.commands) names.push_back(command.spec().name);
  }
  return names;
}

std::string Overview() {
  std::string text = Concat("tessera ", Version(), ": ", kAbout,
                            "\n\nUsage: tessera COMMAND [arguments] [flags]\n");
  for (const CommandGroup& group : CommandGroups()) {
    Append(text, "\n", group.title, ":\n");
    for (const Command& command : group.commands) {
      const CommandSpec spec = command.spec();
      std::string name = spec.name;
      name.resize(12, ' ');
      Append(text, "  ", name, spec.summary, "\n");
    }
  }
  Append(text, "\nEnvironment:\n", TableOf(kVariables),
         "\n'tessera help COMMAND' explains a command, 'tessera help connection' how to reach a\n"
         "daemon. Exit status: 0 success, 1 failure, 2 wrong usage.\n");
  return text;
}

std::string ManualPage() {
  Manual manual("tessera", 1, kAbout);
  manual.Section("SYNOPSIS");
  manual.Paragraphs("tessera COMMAND [arguments] [flags]");
  manual.Section("DESCRIPTION");
  manual.Paragraphs(
      "Shows and changes the state of a running tesserad, explains policies, and runs workers and\n"
      "benchmarks. Text output is for people and may change; --json is for programs.");
  for (const CommandGroup& group : CommandGroups()) {
    manual.Section(group.title);
    for (const Command& command : group.commands) AddCommand(command.spec(), manual);
  }
  manual.Section("CONNECTION FLAGS");
  manual.Paragraphs(
      "Every command that talks to a daemon takes these flags. TLS is for TCP addresses only.");
  AddFlags(ConnectionFlags(Connects::kToDaemon, /*attaches=*/true), manual);
  manual.Section("ENVIRONMENT");
  for (const Variable& variable : kVariables) manual.Item(variable.name, variable.meaning);
  manual.Section("EXIT STATUS");
  for (const Variable& status : kExitStatus) manual.Item(status.name, status.meaning);
  manual.Section("SEE ALSO");
  manual.Paragraphs("tesserad(8)");
  return manual.text();
}

CommandSpec HelpSpec() {
  return {.name = "help",
          .summary = "explain a command, or a topic: connection, manual",
          .description =
              "Explains a command. 'connection' explains the flags that name a daemon, 'manual'\n"
              "prints the manual page as troff input.\n",
          .arguments = {{.name = "COMMAND|TOPIC", .hint = "", .required = false, .repeats = true}},
          .examples = {"tessera help describe", "tessera help bench serve",
                       "tessera help manual | man -l -"},
          .connects = Connects::kNowhere};
}

int RunHelp(std::span<const std::string_view> args) {
  return RunCommand(HelpSpec(), args, PrintHelp);
}

}  // namespace tessera::cli
