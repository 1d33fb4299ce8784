#include "client/cli/bench/report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <thread>

#include "client/cli/table.h"
#include "daemon/base/strings.h"
#include "kernels/dispatch/implementation.h"

namespace tessera::cli::bench {

namespace {

// Three significant digits, so that both 0.043 and 17.2 can be read.
std::string Figure(double value) {
  const double magnitude = std::fabs(value);
  if (magnitude >= 100 || value == 0) return Fixed(value, 0);
  if (magnitude >= 10) return Fixed(value, 1);
  if (magnitude >= 1) return Fixed(value, 2);
  return Fixed(value, 3);
}

std::string JsonNumber(double value) {
  if (!std::isfinite(value)) return "null";
  char text[40];
  std::snprintf(text, sizeof text, "%.6g", value);
  return text;
}

}  // namespace

std::optional<bool> Row::Holds() const {
  if (!goal.has_value()) return std::nullopt;
  const double measured = goal_is_on_ratio && ratio.has_value() ? *ratio : value;
  return sense == Goal::kAtLeast ? measured >= *goal : measured <= *goal;
}

std::string Report::Text() const {
  const bool bytes = std::any_of(rows.begin(), rows.end(),
                                 [](const Row& row) { return row.held_bytes.has_value(); });
  std::vector<Table::Column> columns = {{"row", Align::kLeft}, {"value"}, {"unit", Align::kLeft}};
  if (bytes) columns.insert(columns.end(), {{"held B"}, {"read B"}});
  columns.insert(columns.end(),
                 {{"against", Align::kLeft}, {"ratio"}, {"goal"}, {"holds", Align::kLeft}});
  Table table(columns);
  for (const Row& row : rows) {
    const std::optional<bool> holds = row.Holds();
    std::vector<std::string> cells = {row.name, Figure(row.value), row.unit};
    if (bytes) {
      cells.push_back(row.held_bytes ? Figure(*row.held_bytes) : "-");
      cells.push_back(row.read_bytes ? Figure(*row.read_bytes) : "-");
    }
    cells.push_back(row.baseline.empty() ? "-" : row.baseline);
    cells.push_back(row.ratio ? Figure(*row.ratio) : "-");
    cells.push_back(
        row.goal ? Concat(row.sense == Goal::kAtLeast ? ">= " : "<= ", Figure(*row.goal)) : "-");
    cells.push_back(holds ? (*holds ? "yes" : "NO") : "-");
    table.Add(std::move(cells));
  }
  std::string out = Concat("bench ", name, "   ", Machine(), "\n\n", table.Render());
  if (!notes.empty()) out += "\n";
  for (const std::string& note : notes) Append(out, "  ", note, "\n");
  return out;
}

std::string Report::Json() const {
  std::string out = Concat("{\"name\": ", JsonString(name),
                           ", \"machine\": ", JsonString(Machine()), ", \"rows\": [");
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows[i];
    Append(out, i == 0 ? "" : ", ", "{\"name\": ", JsonString(row.name),
           ", \"value\": ", JsonNumber(row.value), ", \"unit\": ", JsonString(row.unit),
           ", \"baseline\": ", row.baseline.empty() ? "null" : JsonString(row.baseline),
           ", \"ratio\": ", row.ratio ? JsonNumber(*row.ratio) : "null");
    if (row.held_bytes) Append(out, ", \"held_bytes\": ", JsonNumber(*row.held_bytes));
    if (row.read_bytes) Append(out, ", \"read_bytes\": ", JsonNumber(*row.read_bytes));
    if (row.goal) {
      Append(out, ", \"goal\": ", JsonNumber(*row.goal),
             ", \"holds\": ", *row.Holds() ? "true" : "false");
    }
    out += "}";
  }
  out += "]";
  if (!notes.empty()) {
    out += ", \"notes\": [";
    for (std::size_t i = 0; i < notes.size(); ++i) {
      Append(out, i == 0 ? "" : ", ", JsonString(notes[i]));
    }
    out += "]";
  }
  return out + "}\n";
}

std::string Machine() {
  std::string model = "unknown processor";
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    const std::size_t colon = line.find(':');
    if (colon != std::string::npos)
      model = std::string(Trim(std::string_view(line).substr(colon + 1)));
    break;
  }
  return Concat(model, ", ", std::thread::hardware_concurrency(), " cores, kernels ",
                kernels::ImplementationName(kernels::BestImplementation()));
}

double Percentile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const double at = share * static_cast<double>(values.size() - 1);
  const std::size_t low = static_cast<std::size_t>(at);
  const std::size_t high = std::min(low + 1, values.size() - 1);
  const double part = at - static_cast<double>(low);
  return values[low] * (1 - part) + values[high] * part;
}

double Median(std::vector<double> values) { return Percentile(std::move(values), 0.5); }

}  // namespace tessera::cli::bench
