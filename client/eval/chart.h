// A line chart as SVG: shares from 0 to 100 % over one quantity.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "client/eval/tally.h"

namespace tessera::cli::eval {

// Escapes text for HTML content and quoted attributes.
std::string Escaped(std::string_view text);

// There are this many markers: six shapes, filled and hollow. A larger number starts over.
inline constexpr std::size_t kMarkers = 12;
// A marker centred on (x, y), about 8 units wide, in the fill and stroke of its parent.
std::string MarkerSvg(std::size_t marker, double x, double y, std::string_view tooltip);

struct ChartPoint {
  double x = 0;
  double share = 0;
  std::string note;                             // tooltip
  std::optional<Interval> sure = std::nullopt;  // drawn as an error bar
};

struct ChartLine {
  std::string name;
  std::string colour;
  std::vector<ChartPoint> points;
  std::size_t marker = 0;
};

struct Chart {
  std::string title;
  std::string x_title;
  std::vector<std::pair<double, std::string>> ticks;  // ascending; first and last bound the axis
  std::vector<ChartLine> lines;
  // Corners of a dashed staircase, ascending: (x, share). Empty: none is drawn.
  std::vector<std::pair<double, double>> front;
  // Moves the lines apart by a few pixels, so that error bars at one x do not cover each other.
  bool side_by_side = false;

  std::string Svg() const;
};

}  // namespace tessera::cli::eval
