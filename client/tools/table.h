// Aligned text tables, and formats of numbers, durations and JSON strings.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "client/json/json_text.h"

namespace tessera::cli {

enum class Align : std::uint8_t { kLeft, kRight };

class Table {
 public:
  struct Column {
    std::string title;
    Align align = Align::kRight;
    // Maximum width. Longer cells are wrapped at spaces; a longer word is not broken. 0: no limit.
    std::size_t most = 0;
    // Where a table is too wide: columns with larger numbers are left out first; 0: never.
    std::uint8_t leave_out = 0;
    // Before anything is left out, cells of the column may be cut to this width. 0: never.
    std::size_t least = 0;
  };
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  // Needs one cell per column. Control characters, which names of other programs may contain, are
  // replaced.
  void Add(std::vector<std::string> cells);
  // Two spaces between columns, titles underlined, every line indented by `indent` spaces. No line
  // is longer than `columns`; 0: no limit.
  std::string Render(int indent = 0, std::size_t columns = 0) const;
  // The lines of Render, without the underline: titles first.
  std::vector<std::string> Lines(std::size_t columns) const;
  bool empty() const { return rows_.empty(); }

 private:
  struct Layout {
    std::vector<std::size_t> columns;  // that are shown
    std::vector<std::size_t> widths;   // of those
    bool cut = false;                  // cells may be longer than their column
  };
  std::size_t NaturalWidth(std::size_t column) const;
  Layout LayoutFor(std::size_t indent, std::size_t limit) const;
  std::vector<std::string> RowLines(const std::vector<std::string>& cells, const Layout& layout,
                                    std::size_t indent, std::size_t limit) const;

  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

std::string Fixed(double value, int decimals);
// Counts and rates: "42", "13.1k", "2.4M".
std::string Short(double value);
// "12 s", "3 min 20 s", "5 h 2 min".
std::string Age(double seconds);
// `text` wrapped at spaces into at least one line of at most `most` columns; longer words are not
// broken. 0: no limit.
std::vector<std::string> WrappedLines(const std::string& text, std::size_t most);
// `text` in at most `columns` columns; a cut is marked by "~".
std::string Cut(const std::string& text, std::size_t columns);
// "[######....]" with `width` characters inside the brackets.
std::string Bar(double share, int width);
using client::JsonString;

}  // namespace tessera::cli
