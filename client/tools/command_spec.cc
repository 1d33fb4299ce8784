#include "client/tools/command_spec.h"

#include <algorithm>
#include <string_view>

#include "client/tools/table.h"
#include "daemon/base/strings.h"

namespace tessera::cli {

namespace {

constexpr std::size_t kColumns = 80;
constexpr std::size_t kHelpColumn = 28;  // where the text about a flag begins

std::string Shown(const Argument& argument) {
  const std::string name = argument.name + (argument.repeats ? "..." : "");
  return argument.required ? name : Concat("[", name, "]");
}

// The words of `text` in lines of at most kColumns, of which all but the first are indented.
std::string Filled(const std::string& text, std::size_t indent) {
  std::string out;
  for (const std::string& line : WrappedLines(text, kColumns - indent)) {
    Append(out, out.empty() ? "" : std::string(indent, ' '), line, "\n");
  }
  return out;
}

// Paragraphs in lines of at most kColumns. Lines that are indented stay as they are.
std::string Reflowed(std::string_view text) {
  std::string out;
  std::string words;
  const auto flush = [&] {
    if (!words.empty()) out += Filled(words, 0);
    words.clear();
  };
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (!line.empty() && !line.starts_with("  ")) {
      Append(words, words.empty() ? "" : " ", line);
      continue;
    }
    flush();
    Append(out, line, "\n");
  }
  flush();
  return out;
}

}  // namespace

std::vector<Flags::Spec> AllFlags(const CommandSpec& spec) {
  std::vector<Flags::Spec> flags = spec.flags;
  for (Flags::Spec& flag : ConnectionFlags(spec.connects, spec.attaches)) {
    flags.push_back(std::move(flag));
  }
  return flags;
}

std::string Synopsis(const CommandSpec& spec) {
  std::string text = Concat("tessera ", spec.name);
  for (const Argument& argument : spec.arguments) Append(text, " ", Shown(argument));
  return text + (AllFlags(spec).empty() ? "" : " [flags]");
}

std::string FlagLines(const std::vector<Flags::Spec>& flags) {
  std::string out;
  for (const Flags::Spec& flag : flags) {
    if (flag.kind == FlagKind::kInternal) continue;
    std::string left = Concat("  --", flag.name);
    if (!flag.value.empty()) Append(left, "=", flag.value);
    if (left.size() + 2 > kHelpColumn) {
      Append(left, "\n", std::string(kHelpColumn, ' '));
    } else {
      left.resize(kHelpColumn, ' ');
    }
    out += left;
    std::string help = flag.help;
    if (!flag.environment.empty()) Append(help, " Default: $", flag.environment);
    if (!flag.environment.empty()) Append(help, flag.fallback.empty() ? "." : ", or ");
    if (flag.environment.empty() && !flag.fallback.empty()) help += " Default: ";
    if (!flag.fallback.empty()) Append(help, flag.fallback, ".");
    out += Filled(help, kHelpColumn);
  }
  return out;
}

std::string HelpText(const CommandSpec& spec) {
  std::string out = Concat("Usage: ", Synopsis(spec), "\n\n", Reflowed(spec.description));
  if (!spec.examples.empty()) {
    out += spec.examples.size() == 1 ? "\nExample:\n" : "\nExamples:\n";
    for (const std::string& example : spec.examples) Append(out, "  ", example, "\n");
  }
  if (!spec.closing.empty()) Append(out, "\n", Reflowed(spec.closing));
  const std::string flags = FlagLines(spec.flags);
  if (!flags.empty()) Append(out, "\nFlags:\n", flags);
  if (spec.connects == Connects::kToDaemon) {
    out += "\n'tessera help connection' lists --address and the other connection flags.\n";
  } else if (spec.connects == Connects::kToOwnOrDaemon) {
    out +=
        "\nStarts a temporary daemon, unless --address names one. 'tessera help connection'\n"
        "lists the other connection flags.\n";
  }
  return out;
}

std::string ConnectionHelpText() {
  return Concat(
      "Connection flags\n\n",
      Reflowed("Every command that talks to a daemon takes these flags. TLS is for TCP addresses "
               "only.\n"),
      "\n"
      "Examples:\n"
      "  tessera status --address=unix:/run/tessera/gpu1.sock\n"
      "  tessera worker --address=node7:7400 --tls-ca=ca.crt\n"
      "  TESSERA_ADDRESS=node7:7400 tessera health --tls-ca=ca.crt\n\n"
      "Flags:\n",
      FlagLines(ConnectionFlags(Connects::kToDaemon, /*attaches=*/true)), "\n",
      Reflowed("generate and eval start a temporary daemon if --address is not given; they do not "
               "read TESSERA_ADDRESS. Commands of operators, such as status and drain, go to the "
               "daemon's admin socket beside unix:PATH, which only its user and root may use.\n"));
}

absl::Status CheckArguments(const CommandSpec& spec, const std::vector<std::string>& given) {
  for (std::size_t i = given.size(); i < spec.arguments.size(); ++i) {
    const Argument& argument = spec.arguments[i];
    if (!argument.required) continue;
    return absl::InvalidArgumentError(
        Concat("missing ", argument.name, argument.hint.empty() ? "" : "; ", argument.hint));
  }
  const bool open = !spec.arguments.empty() && spec.arguments.back().repeats;
  if (open || given.size() <= spec.arguments.size()) return absl::OkStatus();
  return absl::InvalidArgumentError(Concat(
      "unexpected argument ", Quoted(given[spec.arguments.size()]), "; usage: ", Synopsis(spec)));
}

}  // namespace tessera::cli
