// Aligned text tables and the small formats that status, top and the benchmarks share.
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
    // Longer cells go on in the next line, broken at spaces; a longer word stays whole. 0: as wide
    // as its widest cell.
    std::size_t most = 0;
  };
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  // As many cells as columns.
  void Add(std::vector<std::string> cells);
  // Two spaces between columns, titles underlined, every line indented by `indent`.
  std::string Render(int indent = 0) const;
  bool empty() const { return rows_.empty(); }

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

std::string Fixed(double value, int decimals);
// "42", "13.1k", "2.4M": for counts and rates.
std::string Short(double value);
// "12 s", "3 min 20 s", "5 h 2 min".
std::string Age(double seconds);
// "[######....]" of `width` characters inside the brackets.
std::string Bar(double share, int width);
// Double quotes and control characters escaped, quotes around.
std::string JsonString(const std::string& text);

}  // namespace tessera::cli
