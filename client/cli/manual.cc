#include "client/cli/manual.h"

#include "daemon/base/strings.h"
#include "daemon/base/version.h"

namespace tessera::cli {

namespace {

// A line of text that troff takes literally: no requests, and hyphens that can be copied.
std::string Escaped(std::string_view line) {
  std::string out;
  if (!line.empty() && (line.front() == '.' || line.front() == '\'')) out = "\\&";
  for (const char c : line) {
    if (c == '\\') {
      out += "\\e";
    } else if (c == '-') {
      out += "\\-";
    } else if (c == '\'') {
      out += "\\(aq";
    } else {
      out += c;
    }
  }
  return out;
}

// Calls `act` with each line of `text`.
template <typename Act>
void ForEachLine(std::string_view text, const Act& act) {
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    act(text.substr(0, end));
    if (end == std::string_view::npos) return;
    text.remove_prefix(end + 1);
  }
}

std::string Upper(std::string_view text) {
  std::string upper(text);
  for (char& c : upper) {
    if (c >= 'a' && c <= 'z') c = static_cast<char>(c - 'a' + 'A');
  }
  return upper;
}

}  // namespace

Manual::Manual(std::string_view title, int section, std::string_view summary) {
  // Without a date: equal sources give equal pages.
  Append(text_, ".TH ", Upper(title), " ", section, " \"\" \"Tessera ", Version(),
         "\" \"Tessera manual\"\n.nh\n.ad l\n");
  Section("NAME");
  Append(text_, title, " \\- ", Escaped(summary), "\n");
}

void Manual::Section(std::string_view title) {
  Append(text_, ".SH \"", Escaped(Upper(title)), "\"\n");
}

void Manual::Subsection(std::string_view title) { Append(text_, ".SS \"", Escaped(title), "\"\n"); }

void Manual::Paragraphs(std::string_view text) {
  text_ += ".PP\n";
  bool literal = false;
  const auto set_literal = [&](bool now) {
    if (now != literal) text_ += now ? ".RS 4\n.nf\n" : ".fi\n.RE\n";
    literal = now;
  };
  ForEachLine(text, [&](std::string_view line) {
    const std::string_view words = Trim(line);
    set_literal(line.starts_with("  ") && !words.empty());
    if (literal) {
      Append(text_, Escaped(line.substr(2)), "\n");
    } else {
      Append(text_, words.empty() ? ".PP" : Escaped(words), "\n");
    }
  });
  set_literal(false);
}

void Manual::Verbatim(std::string_view text) {
  text_ += ".PP\n.RS 4\n.nf\n";
  ForEachLine(text, [this](std::string_view line) { Append(text_, Escaped(line), "\n"); });
  text_ += ".fi\n.RE\n";
}

void Manual::Item(std::string_view term, std::string_view text) {
  Append(text_, ".TP\n\\fB", Escaped(term), "\\fR\n", Escaped(text), "\n");
}

}  // namespace tessera::cli
