#include "daemon/policies/grammar/help.h"

#include <algorithm>
#include <array>
#include <tuple>
#include <vector>

#include "daemon/base/strings.h"
#include "daemon/policies/grammar/parse.h"
#include "daemon/policies/registry.h"
#include "daemon/policies/token_policy.h"

namespace tessera::policies {
namespace {

using Row = std::array<std::string, 5>;

Row RowOf(const Option& option) {
  std::string range = RangeText(option);
  if (!option.unit.empty()) Append(range, " (", option.unit, ")");
  return {std::string(option.name), TypeText(option),
          std::string(option.standard.empty() ? "none" : option.standard), range,
          Concat(option.help, ".")};
}

// Each column is as wide as its widest cell, except for the last one.
void AppendTable(std::span<const Row> rows, std::string& text) {
  std::array<std::size_t, std::tuple_size_v<Row>> widths = {};
  for (const Row& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  for (const Row& row : rows) {
    text += "  ";
    for (std::size_t i = 0; i + 1 < row.size(); ++i) {
      text += row[i];
      text.append(widths[i] - row[i].size() + 2, ' ');
    }
    Append(text, row.back(), "\n");
  }
}

void AppendKind(const TermKind& kind, std::string& text) {
  Append(text, "\n", kind.name, ": ", kind.is, ".\n  Sets: ", kind.sets, ".\n");
  if (!kind.paper.empty()) Append(text, "  Paper: ", kind.paper, ".\n");
  if (const std::string needs = NeedsTextOf(kind); !needs.empty()) {
    Append(text, "  Needs: ", needs, ".\n");
  }
  if (kind.options.empty()) return;
  std::vector<Row> rows = {{"option", "type", "default", "range (unit)", "meaning"}};
  for (const Option& option : kind.options) rows.push_back(RowOf(option));
  AppendTable(rows, text);
}

}  // namespace

std::string HelpText() {
  std::string text = Concat(
      "A policy defines how a sequence's KV is compressed and read. It is a list of terms joined "
      "by \"+\", of at most ",
      kMaxPolicyText, " characters.\n\n",
      "  dense                                no compression; an empty text means the same\n"
      "  mosaickv                             one term with default options\n"
      "  mosaickv:keep=25%,group=2+int8       a term with options, and a second term\n"
      "  mosaickv:keep=0.125|0.25+quest       an option with a list of values\n"
      "  snapkv:budget=25%+mosaickv           keep a quarter of the tokens, then pack them\n\n"
      "Write numbers as 0.25 or 25%, and counts as 4096 or 64K. Spaces are ignored.\n");
  for (const TermKind* kind : TermKinds()) AppendKind(*kind, text);
  return text;
}

}  // namespace tessera::policies
