// tessera policies: lists the policy terms and options of this version. No daemon is needed.

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "client/cli/command.h"
#include "client/cli/policies/explain.h"
#include "client/tools/output.h"
#include "client/tools/run_command.h"
#include "client/tools/table.h"
#include "client/tools/terminal.h"
#include "daemon/base/did_you_mean.h"
#include "daemon/base/strings.h"
#include "daemon/policies/registry.h"

namespace tessera::cli {

namespace {

using policies::Option;
using policies::TermKind;

// Widths of wrapped table columns.
struct Widths {
  std::size_t meaning = 48;
  std::size_t needs = 28;
  std::size_t paper = 26;
  std::size_t range = 24;
  std::size_t options = 96;
};

// Whether a table with all columns does not fit.
bool IsNarrow(std::size_t columns) { return columns != 0 && columns < 124; }

Widths WidthsFor(std::size_t columns) {
  if (!IsNarrow(columns)) return {};
  return {.meaning = 26, .needs = 18, .paper = 16, .options = columns - 16};
}

std::string Or(std::string_view text, std::string_view otherwise) {
  return std::string(text.empty() ? otherwise : text);
}

// Options as "name=default", or the name alone if the default depends on something else.
void AddOptions(const TermKind& term, std::size_t most, Table& table) {
  std::string line;
  std::string name(term.name);
  for (const Option& option : term.options) {
    const std::string one = option.standard.empty() ? std::string(option.name)
                                                    : Concat(option.name, "=", option.standard);
    if (line.size() + one.size() + 2 > most) {
      table.Add({std::exchange(name, ""), std::exchange(line, "") + ","});
    }
    if (!line.empty()) line += ", ";
    line += one;
  }
  if (!line.empty()) table.Add({name, line});
}

std::string RenderList(std::size_t columns) {
  const Widths widths = WidthsFor(columns);
  Table table({{"term", Align::kLeft},
               {"meaning", Align::kLeft, widths.meaning},
               {"needs from the worker", Align::kLeft, widths.needs},
               {"paper", Align::kLeft, widths.paper}});
  Table options({{"term", Align::kLeft}, {"options and their defaults", Align::kLeft}});
  for (const TermKind* term : policies::TermKinds()) {
    table.Add({std::string(term->name), Concat(term->is, "."), Or(NeedsTextOf(*term), "-"),
               Or(term->paper, "-")});
    AddOptions(*term, widths.options, options);
  }
  std::string text = Concat(table.Render(0, columns), "\n", options.Render(0, columns), "\n");
  for (const char* hint : {"Join terms with +, for example chunkkv:budget=0.3+mosaickv+int8.",
                           "'tessera policies TERM' explains the options of a term.",
                           "'tessera explain POLICY' says what a policy makes of a prompt."}) {
    for (const std::string& line : WrappedLines(hint, columns)) Append(text, line, "\n");
  }
  return text;
}

// The options one below the other, for a terminal that is too narrow for their table.
std::string OptionList(const TermKind& term, std::size_t columns) {
  constexpr std::size_t kIndent = 4;
  std::string text;
  const auto add = [&](std::size_t indent, const std::string& line) {
    for (const std::string& part : WrappedLines(line, std::max(columns, indent + 1) - indent)) {
      Append(text, std::string(indent, ' '), Cut(part, columns - std::min(columns, indent)), "\n");
    }
  };
  for (const Option& option : term.options) {
    add(0,
        Concat(option.name, "  (", TypeText(option), ", default ", Or(option.standard, "none"),
               ", range ", RangeText(option), option.unit.empty() ? "" : ", ", option.unit, ")"));
    add(kIndent, Concat(option.help, "."));
  }
  return text;
}

std::string RenderTerm(const TermKind& term, std::size_t columns) {
  const Widths widths = WidthsFor(columns);
  std::string text;
  const auto add = [&](const std::string& line) {
    for (const std::string& part : WrappedLines(line, columns)) Append(text, part, "\n");
  };
  add(Concat(term.name, ": ", term.is, "."));
  add(Concat("sets: ", term.sets));
  if (!term.paper.empty()) add(Concat("paper: ", term.paper));
  if (const std::string needs = NeedsTextOf(term); !needs.empty()) {
    add(Concat("needs from the worker: ", needs));
  }
  if (term.options.empty()) return text;
  if (IsNarrow(columns)) return Concat(text, "\n", OptionList(term, columns));
  Table table({{"option", Align::kLeft},
               {"type", Align::kLeft},
               {"default", Align::kLeft},
               {"range", Align::kLeft, widths.range},
               {"unit", Align::kLeft},
               {"meaning", Align::kLeft, widths.meaning}});
  for (const Option& option : term.options) {
    table.Add({std::string(option.name), TypeText(option), Or(option.standard, "-"),
               RangeText(option), Or(option.unit, "-"), Concat(option.help, ".")});
  }
  return Concat(text, "\n", table.Render(0, columns));
}

std::string Member(const char* name, std::string_view value) {
  return Concat("\"", name, "\":", JsonString(std::string(value)));
}

std::string JsonOf(const TermKind& term) {
  std::string options;
  for (const Option& option : term.options) {
    Append(options, options.empty() ? "" : ",", "{", Member("name", option.name), ",",
           Member("type", TypeText(option)), ",", Member("standard", option.standard), ",",
           Member("range", RangeText(option)), ",", Member("unit", option.unit), ",",
           Member("help", Concat(option.help, ".")), "}");
  }
  return Concat("{", Member("name", term.name), ",", Member("meaning", Concat(term.is, ".")), ",",
                Member("sets", term.sets), ",", Member("paper", term.paper), ",",
                Member("needs", NeedsTextOf(term)), ",\"options\":[", options, "]}");
}

absl::StatusOr<const TermKind*> TermNamed(const std::string& name) {
  if (const TermKind* const term = policies::FindTermKind(name)) return term;
  std::vector<std::string_view> names;
  for (const TermKind* known : policies::TermKinds()) names.push_back(known->name);
  return absl::InvalidArgumentError(Concat("unknown policy term ", Quoted(name),
                                           "; 'tessera policies' lists them",
                                           DidYouMean(name, names)));
}

absl::Status List(const Flags& flags) {
  const std::vector<std::string>& given = flags.positional();
  if (!given.empty() && given[0] == "check") {
    if (given.size() == 2) return ExplainPolicy(given[1], flags);
    return absl::InvalidArgumentError("missing POLICY after check");
  }
  if (given.size() > 1) {
    return absl::InvalidArgumentError(
        Concat("unexpected argument ", Quoted(given[1]), "; expected one policy term or none"));
  }
  const std::size_t columns = OutputColumns();
  if (given.empty() && !flags.Has("json")) return Print(RenderList(columns));
  std::vector<const TermKind*> terms(policies::TermKinds().begin(), policies::TermKinds().end());
  if (!given.empty()) {
    const absl::StatusOr<const TermKind*> term = TermNamed(given[0]);
    if (!term.ok()) return term.status();
    if (!flags.Has("json")) return Print(RenderTerm(**term, columns));
    terms = {*term};
  }
  std::string json;
  for (const TermKind* term : terms) Append(json, json.empty() ? "" : ",", JsonOf(*term));
  return Print(Concat("{\"terms\":[", json, "]}\n"));
}

}  // namespace

CommandSpec PoliciesSpec() {
  return {
      .name = "policies",
      .summary = "list policy terms and their options; check a policy",
      .description =
          "Lists the policy terms of this version, or the options of one term with defaults and\n"
          "limits. 'tessera policies check POLICY' does what 'tessera explain POLICY' does. No\n"
          "daemon is needed.\n",
      .arguments = {{.name = "TERM|check", .hint = "", .required = false},
                    {.name = "POLICY", .hint = "", .required = false}},
      .examples = {"tessera policies", "tessera policies mosaickv",
                   "tessera policies check snapkv:budget=0.25+mosaickv --tokens=4000"},
      .flags = ExplainFlags(),
      .connects = Connects::kNowhere};
}

int RunPolicies(std::span<const std::string_view> args) {
  return RunCommand(PoliciesSpec(), args, List);
}

}  // namespace tessera::cli
