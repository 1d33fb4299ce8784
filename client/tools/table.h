// Aligned text tables, and formats of numbers, durations and JSON strings.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::cli {

enum class Align : std::uint8_t { kLeft, kRight };

class Table {
 public:
  struct Column {
    std::string title;
    Align align = Align::kRight;
    // Maximum width. Longer cells are wrapped at spaces; a longer word is not broken. 0: no limit.
    std::size_t most = 0;
  };
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  // Needs one cell per column.
  void Add(std::vector<std::string> cells);
  // Two spaces between columns, titles underlined, every line indented by `indent` spaces.
  std::string Render(int indent = 0) const;
  bool empty() const { return rows_.empty(); }

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

std::string Fixed(double value, int decimals);
// Counts and rates: "42", "13.1k", "2.4M".
std::string Short(double value);
// "12 s", "3 min 20 s", "5 h 2 min".
std::string Age(double seconds);
// "[######....]" with `width` characters inside the brackets.
std::string Bar(double share, int width);
// `text` as a JSON string, quotes included.
std::string JsonString(const std::string& text);

}  // namespace tessera::cli
