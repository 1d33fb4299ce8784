// Writes manual pages as troff input with the man macros.
#pragma once

#include <string>
#include <string_view>

namespace tessera::cli {

class Manual {
 public:
  // `title`: "tessera". `section`: 1 for commands, 8 for daemons.
  Manual(std::string_view title, int section, std::string_view summary);

  void Section(std::string_view title);  // "FILES"
  void Subsection(std::string_view title);
  // Text in paragraphs, which empty lines separate. Line breaks count only before lines that are
  // indented by two spaces.
  void Paragraphs(std::string_view text);
  // Text whose line breaks and spaces count.
  void Verbatim(std::string_view text);
  // A term in bold with its explanation.
  void Item(std::string_view term, std::string_view text);

  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

}  // namespace tessera::cli
