// tessera policies: lists the policy terms and options that a daemon supports.

#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "client/cli/command.h"
#include "client/tools/admin.h"
#include "client/tools/connection.h"
#include "client/tools/run_command.h"
#include "client/tools/table.h"
#include "daemon/base/did_you_mean.h"
#include "daemon/base/strings.h"

namespace tessera::cli {

namespace {

// Widths of wrapped table columns.
constexpr std::size_t kMeaningColumns = 48;
constexpr std::size_t kNeedsColumns = 28;
constexpr std::size_t kPaperColumns = 26;
constexpr std::size_t kRangeColumns = 24;
constexpr std::size_t kOptionColumns = 96;

// Options as "name=default", or the name alone if the default depends on something else.
void AddOptions(const v1::PolicyTerm& term, Table& table) {
  std::string line;
  std::string name = term.name();
  for (const v1::PolicyOption& option : term.options()) {
    const std::string one =
        option.standard().empty() ? option.name() : Concat(option.name(), "=", option.standard());
    if (line.size() + one.size() + 2 > kOptionColumns) {
      table.Add({std::exchange(name, ""), std::exchange(line, "") + ","});
    }
    if (!line.empty()) line += ", ";
    line += one;
  }
  if (!line.empty()) table.Add({name, line});
}

std::string RenderList(const v1::ListPoliciesResponse& policies) {
  Table table({{"term", Align::kLeft},
               {"meaning", Align::kLeft, kMeaningColumns},
               {"needs from the worker", Align::kLeft, kNeedsColumns},
               {"paper", Align::kLeft, kPaperColumns}});
  for (const v1::PolicyTerm& term : policies.terms()) {
    table.Add({term.name(), term.meaning(), term.needs().empty() ? "-" : term.needs(),
               term.paper().empty() ? "-" : term.paper()});
  }
  Table options({{"term", Align::kLeft}, {"options and their defaults", Align::kLeft}});
  for (const v1::PolicyTerm& term : policies.terms()) AddOptions(term, options);
  return table.Render() + "\n" + options.Render() +
         "\nJoin terms with +, for example chunkkv:budget=0.3+mosaickv+int8.\n"
         "'tessera policies TERM' explains the options of one term and their limits.\n";
}

std::string RenderTerm(const v1::PolicyTerm& term) {
  std::string text = Concat(term.name(), ": ", term.meaning(), "\nsets: ", term.sets(), "\n");
  if (!term.paper().empty()) text += Concat("paper: ", term.paper(), "\n");
  if (!term.needs().empty()) text += Concat("needs from the worker: ", term.needs(), "\n");
  if (term.options().empty()) return text;
  Table table({{"option", Align::kLeft},
               {"type", Align::kLeft},
               {"default", Align::kLeft},
               {"range", Align::kLeft, kRangeColumns},
               {"unit", Align::kLeft},
               {"meaning", Align::kLeft, kMeaningColumns}});
  for (const v1::PolicyOption& option : term.options()) {
    table.Add({option.name(), option.type(), option.standard().empty() ? "-" : option.standard(),
               option.range(), option.unit().empty() ? "-" : option.unit(), option.help()});
  }
  return Concat(text, "\n", table.Render());
}

absl::Status LeaveOnly(const std::string& name, v1::ListPoliciesResponse& policies) {
  const auto term = std::ranges::find(policies.terms(), name, &v1::PolicyTerm::name);
  if (term == policies.terms().end()) {
    std::vector<std::string_view> names;
    for (const v1::PolicyTerm& known : policies.terms()) names.push_back(known.name());
    return absl::InvalidArgumentError(Concat("unknown policy term \"", name,
                                             "\"; 'tessera policies' lists them",
                                             DidYouMean(name, names)));
  }
  v1::PolicyTerm only = *term;
  policies.mutable_terms()->Clear();
  *policies.add_terms() = std::move(only);
  return absl::OkStatus();
}

absl::Status List(const Flags& flags) {
  if (flags.positional().size() > 1) {
    return absl::InvalidArgumentError(
        Concat("got ", flags.positional().size(), " arguments; expected one policy term or none"));
  }
  absl::StatusOr<Admin> admin = Admin::At(ConnectionOf(flags));
  if (!admin.ok()) return admin.status();
  absl::StatusOr<v1::ListPoliciesResponse> policies = admin->Policies();
  if (absl::IsUnavailable(policies.status())) {
    return absl::UnavailableError(
        Concat(policies.status().message(), "; 'tesserad --print-policies' needs no daemon"));
  }
  if (!policies.ok()) return policies.status();
  if (!flags.positional().empty()) {
    if (absl::Status status = LeaveOnly(flags.positional()[0], *policies); !status.ok()) {
      return status;
    }
  }
  if (flags.Has("json")) {
    google::protobuf::util::JsonPrintOptions options;
    options.preserve_proto_field_names = true;
    std::string json;
    if (!google::protobuf::util::MessageToJsonString(*policies, &json, options).ok()) {
      return absl::InternalError("the response cannot be converted to JSON");
    }
    std::printf("%s\n", json.c_str());
    return absl::OkStatus();
  }
  if (flags.positional().empty()) {
    std::fputs(RenderList(*policies).c_str(), stdout);
    return absl::OkStatus();
  }
  std::fputs(RenderTerm(policies->terms(0)).c_str(), stdout);
  return absl::OkStatus();
}

}  // namespace

int RunPolicies(std::span<const std::string_view> args) {
  return RunWithArguments(
      Flags("Usage: tessera policies [TERM] [--json] [--address=ADDRESS]\n\n"
            "Lists the policy terms, or the options of one term with defaults and limits.\n\n"
            "Examples:\n"
            "  tessera policies\n"
            "  tessera policies mosaickv",
            WithConnection({{"json", "", "Print one JSON object instead of a table.", ""}})),
      args, List);
}

}  // namespace tessera::cli
