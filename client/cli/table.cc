#include "client/cli/table.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "daemon/base/check.h"
#include "daemon/base/strings.h"

namespace tessera::cli {

namespace {

// Columns a terminal shows for UTF-8 text without wide characters.
std::size_t Width(const std::string& text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xc0) != 0x80;
  }));
}

std::string Pad(const std::string& text, std::size_t width, Align align) {
  const std::string space(width > Width(text) ? width - Width(text) : 0, ' ');
  return align == Align::kLeft ? text + space : space + text;
}

}  // namespace

void Table::Add(std::vector<std::string> cells) {
  TESSERA_CHECK(cells.size() == columns_.size(), "a row has a cell per column");
  rows_.push_back(std::move(cells));
}

std::string Table::Render(int indent) const {
  std::vector<std::size_t> widths;
  for (std::size_t c = 0; c < columns_.size(); ++c) {
    std::size_t width = Width(columns_[c].title);
    for (const std::vector<std::string>& row : rows_) width = std::max(width, Width(row[c]));
    widths.push_back(width);
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
  for (const std::vector<std::string>& row : rows_) {
    out += line([&](std::size_t c) { return row[c]; });
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
