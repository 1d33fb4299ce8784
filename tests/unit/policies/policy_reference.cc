#include "tests/unit/policies/policy_reference.h"

#include <string_view>

#include "daemon/base/strings.h"
#include "daemon/policies/registry.h"

namespace tessera::policies {

namespace {

constexpr std::string_view kHead = R"(# Policy options

Every term that a policy may name, with its options. Generated from the registry: do not edit.
`tessera policies` prints the same. [Policies](../../daemon/policies/README.md) says which to
choose and how terms compose.

)";

// Bars end a cell of a Markdown table.
std::string Cell(std::string_view text) {
  std::string cell;
  for (const char c : text) {
    if (c == '|') cell += '\\';
    cell += c;
  }
  return cell;
}

std::string Code(std::string_view text) {
  return text.empty() ? std::string() : Concat("`", Cell(text), "`");
}

void AppendTerm(std::string& out, const TermKind& kind) {
  Append(out, "## ", kind.name, "\n\n", kind.is, ".\n\n- Sets: ", kind.sets, ".\n");
  if (!kind.paper.empty()) Append(out, "- Paper: ", kind.paper, ".\n");
  const std::string needs = NeedsTextOf(kind);
  if (!needs.empty()) Append(out, "- Needs: ", needs, ".\n");
  out += "\n";
  if (kind.options.empty()) return;
  out += "| option | type | default | range | unit | meaning |\n|---|---|---|---|---|---|\n";
  for (const Option& option : kind.options) {
    Append(out, "| ", Code(option.name), " | ", Cell(TypeText(option)), " | ",
           Code(option.standard), " | ", Cell(RangeText(option)), " | ", option.unit, " | ",
           Cell(option.help), ". |\n");
  }
  out += "\n";
}

}  // namespace

std::string PolicyReference() {
  std::string out(kHead);
  for (const TermKind* kind : TermKinds()) AppendTerm(out, *kind);
  out.pop_back();  // the last empty line
  return out;
}

}  // namespace tessera::policies
