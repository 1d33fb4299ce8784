#include "client/eval/chart.h"

#include "client/tools/table.h"
#include "daemon/base/check.h"
#include "daemon/base/strings.h"

namespace tessera::cli::eval {

namespace {

// Size and margins, in pixels.
constexpr double kWidth = 420, kHeight = 280;
constexpr double kLeft = 44, kRight = 14, kTop = 28, kBottom = 40;

std::string Pixel(double value) { return Fixed(value, 1); }

double Y(double share) { return kTop + (1 - share) * (kHeight - kTop - kBottom); }

std::string Text(double x, double y, std::string_view anchor, std::string_view text) {
  return Concat("<text x=\"", Pixel(x), "\" y=\"", Pixel(y), "\" text-anchor=\"", anchor, "\">",
                Escaped(text), "</text>\n");
}

std::string Line(double x1, double y1, double x2, double y2) {
  return Concat("<line class=\"grid\" x1=\"", Pixel(x1), "\" y1=\"", Pixel(y1), "\" x2=\"",
                Pixel(x2), "\" y2=\"", Pixel(y2), "\"/>\n");
}

}  // namespace

std::string Escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string Chart::Svg() const {
  TESSERA_CHECK(!ticks.empty(), "a chart needs an axis");
  const double low = ticks.front().first;
  const double span = ticks.back().first > low ? ticks.back().first - low : 1;
  const auto x_of = [&](double x) { return kLeft + (x - low) / span * (kWidth - kLeft - kRight); };
  std::string svg =
      Concat("<svg viewBox=\"0 0 ", kWidth, " ", kHeight, "\" role=\"img\" aria-label=\"",
             Escaped(title), "\">\n", Text(kLeft, 16, "start", title));
  for (const double share : {0.0, 0.25, 0.5, 0.75, 1.0}) {
    Append(svg, Line(kLeft, Y(share), kWidth - kRight, Y(share)),
           Text(kLeft - 6, Y(share) + 4, "end", Fixed(100 * share, 0) + " %"));
  }
  for (const auto& [x, label] : ticks) {
    Append(svg, Line(x_of(x), Y(1), x_of(x), Y(0)),
           Text(x_of(x), kHeight - kBottom + 15, "middle", label));
  }
  svg += Text((kLeft + kWidth - kRight) / 2, kHeight - 8, "middle", x_title);
  for (const ChartLine& line : lines) {
    Append(svg, "<g stroke=\"", Escaped(line.colour), "\" fill=\"", Escaped(line.colour),
           "\"><title>", Escaped(line.name), "</title>\n<polyline fill=\"none\" points=\"");
    for (const ChartPoint& point : line.points) {
      Append(svg, Pixel(x_of(point.x)), ",", Pixel(Y(point.share)), " ");
    }
    svg += "\"/>\n";
    for (const ChartPoint& point : line.points) {
      Append(svg, "<circle cx=\"", Pixel(x_of(point.x)), "\" cy=\"", Pixel(Y(point.share)),
             "\" r=\"3\"><title>", Escaped(point.note), "</title></circle>\n");
    }
    svg += "</g>\n";
  }
  return svg + "</svg>\n";
}

}  // namespace tessera::cli::eval
