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

// Wraps `text` at spaces into at least one line.
std::vector<std::string> Lines(const std::string& text, std::size_t most) {
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

}  // namespace

void Table::Add(std::vector<std::string> cells) {
  TESSERA_CHECK(cells.size() == columns_.size(), "a row has one cell per column");
  rows_.push_back(std::move(cells));
}

std::string Table::Render(int indent) const {
  std::vector<std::size_t> widths;
  for (const Column& column : columns_) widths.push_back(Width(column.title));
  // [row][column]: the lines of the wrapped cell.
  std::vector<std::vector<std::vector<std::string>>> cells;
  for (const std::vector<std::string>& row : rows_) {
    cells.emplace_back();
    for (std::size_t c = 0; c < columns_.size(); ++c) {
      cells.back().push_back(Lines(row[c], columns_[c].most));
      for (const std::string& text : cells.back().back()) {
        widths[c] = std::max(widths[c], Width(text));
      }
    }
  }
  const auto line = [&](const auto& cell) {
    std::string text(static_cast<std::size_t>(indent), ' ');
    for (std::size_t c = 0; c < columns_.size(); ++c) {
      if (c > 0) text += "  ";
      text += Pad(cell(c), widths[c], columns_[c].align);
    }
    text.erase(text.find_last_not_of(' ') + 1);
    return text + "\n";
  };
  std::string out = line([&](std::size_t c) { return columns_[c].title; });
  out += line([&](std::size_t c) { return std::string(widths[c], '-'); });
  for (const std::vector<std::vector<std::string>>& row : cells) {
    std::size_t lines = 0;
    for (const std::vector<std::string>& cell : row) lines = std::max(lines, cell.size());
    for (std::size_t i = 0; i < lines; ++i) {
      out += line([&](std::size_t c) { return i < row[c].size() ? row[c][i] : std::string(); });
    }
  }
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

std::string JsonString(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", c);
      out += escaped;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

}  // namespace tessera::cli
