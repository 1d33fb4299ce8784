#include "client/tools/table.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <sstream>

#include "daemon/base/check.h"
#include "daemon/base/strings.h"

namespace tessera::cli {

namespace {

// Terminal columns of UTF-8 text without wide characters.
std::size_t Width(const std::string& text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xc0) != 0x80;
  }));
}

std::string Pad(const std::string& text, std::size_t width, Align align) {
  const std::string space(width > Width(text) ? width - Width(text) : 0, ' ');
  return align == Align::kLeft ? text + space : space + text;
}

constexpr std::size_t kGap = 2;  // spaces between columns

std::size_t TotalWidth(const std::vector<std::size_t>& widths) {
  std::size_t total = 0;
  for (const std::size_t width : widths) total += width + kGap;
  return total == 0 ? 0 : total - kGap;
}

bool IsControl(char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }

}  // namespace

std::vector<std::string> WrappedLines(const std::string& text, std::size_t most) {
  if (most == 0 || Width(text) <= most) return {text};
  std::vector<std::string> lines(1);
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    std::string& line = lines.back();
    if (line.empty()) {
      line = word;
    } else if (Width(line) + 1 + Width(word) <= most) {
      Append(line, " ", word);
    } else {
      lines.push_back(word);
    }
  }
  return lines;
}

std::string Cut(const std::string& text, std::size_t columns) {
  if (Width(text) <= columns) return text;
  if (columns == 0) return "";
  std::size_t end = 0;
  for (std::size_t width = 0; end < text.size(); ++end) {
    width += (static_cast<unsigned char>(text[end]) & 0xc0) != 0x80;
    if (width == columns) break;  // the first byte of the character that "~" replaces
  }
  return text.substr(0, end) + "~";
}

void Table::Add(std::vector<std::string> cells) {
  TESSERA_CHECK(cells.size() == columns_.size(), "a row has one cell per column");
  for (std::string& cell : cells) std::ranges::replace_if(cell, IsControl, '?');
  rows_.push_back(std::move(cells));
}

std::size_t Table::NaturalWidth(std::size_t column) const {
  std::size_t width = Width(columns_[column].title);
  for (const std::vector<std::string>& row : rows_) {
    for (const std::string& line : WrappedLines(row[column], columns_[column].most)) {
      width = std::max(width, Width(line));
    }
  }
  return width;
}

Table::Layout Table::LayoutFor(std::size_t indent, std::size_t limit) const {
  Layout layout;
  for (std::size_t c = 0; c < columns_.size(); ++c) {
    layout.columns.push_back(c);
    layout.widths.push_back(NaturalWidth(c));
  }
  if (limit == 0) return layout;
  // How much narrower a column can become.
  const auto spare = [&](std::size_t i) {
    const Column& column = columns_[layout.columns[i]];
    const std::size_t least = std::max(column.least, Width(column.title));
    return column.least == 0 || layout.widths[i] <= least ? 0 : layout.widths[i] - least;
  };
  const auto excess = [&] {
    const std::size_t total = indent + TotalWidth(layout.widths);
    return total > limit ? total - limit : 0;
  };
  // Leave out what does not fit even if every other column is cut.
  for (;;) {
    std::size_t most = 0;
    std::size_t last = layout.columns.size();
    for (std::size_t i = 0; i < layout.columns.size(); ++i) {
      most += spare(i);
      const std::uint8_t rank = columns_[layout.columns[i]].leave_out;
      if (rank != 0 &&
          (last == layout.columns.size() || rank >= columns_[layout.columns[last]].leave_out)) {
        last = i;
      }
    }
    if (excess() <= most || last == layout.columns.size()) break;
    layout.columns.erase(layout.columns.begin() + static_cast<std::ptrdiff_t>(last));
    layout.widths.erase(layout.widths.begin() + static_cast<std::ptrdiff_t>(last));
  }
  // Cut the widest first.
  while (excess() > 0) {
    std::size_t best = 0;
    for (std::size_t i = 1; i < layout.columns.size(); ++i) {
      if (spare(i) > spare(best)) best = i;
    }
    if (layout.columns.empty() || spare(best) == 0) break;  // RowLines cuts the whole line
    layout.widths[best] -= std::min(spare(best), excess());
    layout.cut = true;
  }
  return layout;
}

std::vector<std::string> Table::RowLines(const std::vector<std::string>& cells,
                                         const Layout& layout, std::size_t indent,
                                         std::size_t limit) const {
  std::vector<std::vector<std::string>> wrapped;
  std::size_t height = 1;
  for (std::size_t i = 0; i < layout.columns.size(); ++i) {
    const std::size_t column = layout.columns[i];
    std::vector<std::string> lines = WrappedLines(cells[column], columns_[column].most);
    if (layout.cut) {
      for (std::string& line : lines) line = Cut(line, layout.widths[i]);
    }
    height = std::max(height, lines.size());
    wrapped.push_back(std::move(lines));
  }
  std::vector<std::string> out;
  for (std::size_t k = 0; k < height; ++k) {
    std::string text(indent, ' ');
    for (std::size_t i = 0; i < layout.columns.size(); ++i) {
      if (i > 0) text.append(kGap, ' ');
      text += Pad(k < wrapped[i].size() ? wrapped[i][k] : "", layout.widths[i],
                  columns_[layout.columns[i]].align);
    }
    text.erase(text.find_last_not_of(' ') + 1);
    out.push_back(limit == 0 ? text : Cut(text, limit));
  }
  return out;
}

std::vector<std::string> Table::Lines(std::size_t columns) const {
  const Layout layout = LayoutFor(0, columns);
  std::vector<std::string> titles;
  for (const Column& column : columns_) titles.push_back(column.title);
  std::vector<std::string> out = RowLines(titles, layout, 0, columns);
  for (const std::vector<std::string>& row : rows_) {
    for (std::string& line : RowLines(row, layout, 0, columns)) out.push_back(std::move(line));
  }
  return out;
}

std::string Table::Render(int indent, std::size_t columns) const {
  const auto margin = static_cast<std::size_t>(indent);
  const Layout layout = LayoutFor(margin, columns);
  std::string out;
  const auto add = [&](const std::vector<std::string>& cells) {
    for (const std::string& line : RowLines(cells, layout, margin, columns)) {
      Append(out, line, "\n");
    }
  };
  std::vector<std::string> titles;
  std::vector<std::string> rule(columns_.size());
  for (const Column& column : columns_) titles.push_back(column.title);
  for (std::size_t i = 0; i < layout.columns.size(); ++i) {
    rule[layout.columns[i]] = std::string(layout.widths[i], '-');
  }
  add(titles);
  add(rule);
  for (const std::vector<std::string>& row : rows_) add(row);
  return out;
}

std::string Fixed(double value, int decimals) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", decimals, value);
  return text;
}

std::string Short(double value) {
  constexpr const char* kUnits[] = {"", "k", "M", "G", "T"};
  int unit = 0;
  while (std::fabs(value) >= 999.5 && unit < 4) {
    value /= 1000;
    ++unit;
  }
  const bool whole = unit == 0 && value == std::floor(value);
  return Concat(Fixed(value, whole ? 0 : 1), kUnits[unit]);
}

std::string Age(double seconds) {
  const auto whole = static_cast<std::uint64_t>(std::max(0.0, seconds));
  if (whole < 60) return Concat(whole, " s");
  if (whole < 3600) return Concat(whole / 60, " min ", whole % 60, " s");
  return Concat(whole / 3600, " h ", whole % 3600 / 60, " min");
}

std::string Bar(double share, int width) {
  const int full = static_cast<int>(std::lround(std::clamp(share, 0.0, 1.0) * width));
  return Concat("[", std::string(full, '#'), std::string(width - full, '.'), "]");
}

}  // namespace tessera::cli
