// A line chart as SVG: shares, from 0 to 100 %, over some quantity.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::cli::eval {

// Safe between tags and in quoted attributes.
std::string Escaped(std::string_view text);

struct ChartPoint {
  double x = 0;
  double share = 0;
  std::string note;  // shown where the pointer rests
};

struct ChartLine {
  std::string name;
  std::string colour;
  std::vector<ChartPoint> points;
};

struct Chart {
  std::string title;
  std::string x_title;
  std::vector<std::pair<double, std::string>> ticks;  // ascending; the first and last are the ends
  std::vector<ChartLine> lines;

  std::string Svg() const;
};

}  // namespace tessera::cli::eval
