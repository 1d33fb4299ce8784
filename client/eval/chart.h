// A line chart as SVG: shares from 0 to 100 % over one quantity.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::cli::eval {

// Escapes text for HTML content and quoted attributes.
std::string Escaped(std::string_view text);

struct ChartPoint {
  double x = 0;
  double share = 0;
  std::string note;  // tooltip
};

struct ChartLine {
  std::string name;
  std::string colour;
  std::vector<ChartPoint> points;
};

struct Chart {
  std::string title;
  std::string x_title;
  std::vector<std::pair<double, std::string>> ticks;  // ascending; first and last bound the axis
  std::vector<ChartLine> lines;

  std::string Svg() const;
};

}  // namespace tessera::cli::eval
