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

// The 95 % interval of a point: a vertical line with two caps.
std::string ErrorBar(double x, const Interval& sure) {
  return Concat("<path class=\"bar\" d=\"M", Pixel(x), " ", Pixel(Y(sure.low)), "V",
                Pixel(Y(sure.high)), "m-2.5 0h5M", Pixel(x - 2.5), " ", Pixel(Y(sure.low)),
                "h5\"/>\n");
}

}  // namespace

std::string MarkerSvg(std::size_t marker, double x, double y, std::string_view tooltip) {
  constexpr std::size_t kShapes = kMarkers / 2;
  const std::string hollow = marker % kMarkers < kShapes ? "" : " fill=\"#fff\"";
  const std::string end = Concat("><title>", Escaped(tooltip), "</title></");
  const auto path = [&](double dx, double dy, std::string_view steps) {
    return Concat("<path d=\"M", Pixel(x + dx), " ", Pixel(y + dy), steps, "z\"", hollow, end,
                  "path>\n");
  };
  switch (marker % kShapes) {
    case 0:
      return Concat("<circle cx=\"", Pixel(x), "\" cy=\"", Pixel(y), "\" r=\"3.5\"", hollow, end,
                    "circle>\n");
    case 1:
      return path(-3.2, -3.2, "h6.4v6.4h-6.4");
    case 2:
      return path(0, -4.4, "l4.2 7.4h-8.4");
    case 3:
      return path(0, -4.6, "l4.6 4.6l-4.6 4.6l-4.6 -4.6");
    case 4:
      return path(0, 4.4, "l4.2 -7.4h-8.4");
    default:
      return path(-3.8, -3.8, "h7.6l-7.6 7.6h7.6");
  }
}

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
  const double apart = side_by_side ? 3 : 0;  // pixels between neighbouring lines
  const double inset = apart * static_cast<double>(lines.size()) / 2;
  const auto x_of = [&](double x) {
    return kLeft + inset + (x - low) / span * (kWidth - kLeft - kRight - 2 * inset);
  };
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
  if (!front.empty()) svg += "<polyline class=\"front\" points=\"";
  for (std::size_t i = 0; i < front.size(); ++i) {
    const std::string x = Pixel(x_of(front[i].first));
    if (i > 0) Append(svg, x, ",", Pixel(Y(front[i - 1].second)), " ");
    Append(svg, x, ",", Pixel(Y(front[i].second)), " ");
  }
  if (!front.empty()) svg += "\"><title>Pareto front</title></polyline>\n";
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const ChartLine& line = lines[i];
    const double aside = apart * (static_cast<double>(i) + 0.5) - inset;
    Append(svg, "<g stroke=\"", Escaped(line.colour), "\" fill=\"", Escaped(line.colour),
           "\"><title>", Escaped(line.name), "</title>\n<polyline fill=\"none\" points=\"");
    for (const ChartPoint& point : line.points) {
      Append(svg, Pixel(x_of(point.x) + aside), ",", Pixel(Y(point.share)), " ");
    }
    svg += "\"/>\n";
    for (const ChartPoint& point : line.points) {
      const double x = x_of(point.x) + aside;
      if (point.sure) svg += ErrorBar(x, *point.sure);
      svg += MarkerSvg(line.marker, x, Y(point.share), point.note);
    }
    svg += "</g>\n";
  }
  return svg + "</svg>\n";
}

}  // namespace tessera::cli::eval
