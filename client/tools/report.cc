#include "client/tools/report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <thread>

#include "client/tools/table.h"
#include "daemon/base/strings.h"
#include "kernels/dispatch/implementation.h"

namespace tessera::cli::bench {

namespace {

std::string JsonNumber(double value) {
  if (!std::isfinite(value)) return "null";
  char text[40];
  std::snprintf(text, sizeof text, "%.6g", value);
  return text;
}

bool Any(const std::vector<Row>& rows, std::optional<double> Row::*field) {
  return std::any_of(rows.begin(), rows.end(),
                     [field](const Row& row) { return (row.*field).has_value(); });
}

std::string Cell(const std::optional<double>& value) { return value ? Figure(*value) : "-"; }

// An optional figure of a row: a table column and a JSON field.
struct Extra {
  const char* title;
  const char* json;
  std::optional<double> Row::*field;
};
constexpr Extra kExtras[] = {
    {"kept mass", "kept_mass", &Row::kept_mass},
    {"needles", "needles", &Row::needles},
    {"anywhere", "needles_anywhere", &Row::anywhere},
    {"tokens", "tokens_kept", &Row::tokens},
    {"elements", "elements_kept", &Row::elements},
    {"bytes", "bytes_kept", &Row::bytes},
    {"observe ms/1K", "show_ms_per_1k", &Row::show_ms_per_1k},
    {"compress ms/1K", "ms_per_1k", &Row::ms_per_1k},
    {"p50 ms", "p50_ms", &Row::p50_ms},
    {"p99 ms", "p99_ms", &Row::p99_ms},
    {"daemon CPU %", "daemon_cpu", &Row::daemon_cpu},
    {"pool MiB", "pool_mib", &Row::pool_mib},
    {"stored B", "held_bytes", &Row::held_bytes},
    {"read B", "read_bytes", &Row::read_bytes},
};

// Optional columns appear only if at least one row has the figure.
Table TableOf(const std::vector<Row>& rows) {
  std::vector<Table::Column> columns = {{"row", Align::kLeft}, {"value"}, {"unit", Align::kLeft}};
  for (const Extra& extra : kExtras) {
    if (Any(rows, extra.field)) columns.push_back({extra.title});
  }
  columns.insert(columns.end(),
                 {{"baseline", Align::kLeft}, {"ratio"}, {"goal"}, {"met", Align::kLeft}});
  Table table(columns);
  for (const Row& row : rows) {
    const std::optional<bool> holds = row.Holds();
    std::vector<std::string> cells = {row.name, std::isnan(row.value) ? "-" : Figure(row.value),
                                      row.unit};
    for (const Extra& extra : kExtras) {
      if (Any(rows, extra.field)) cells.push_back(Cell(row.*extra.field));
    }
    cells.push_back(row.baseline.empty() ? "-" : row.baseline);
    cells.push_back(Cell(row.ratio));
    cells.push_back(
        row.goal ? Concat(row.sense == Goal::kAtLeast ? ">= " : "<= ", Figure(*row.goal)) : "-");
    cells.push_back(holds ? (*holds ? "yes" : "NO") : "-");
    table.Add(std::move(cells));
  }
  return table;
}

std::string JsonOf(const Row& row) {
  std::string out =
      Concat("{\"name\": ", JsonString(row.name), ", \"value\": ", JsonNumber(row.value),
             ", \"unit\": ", JsonString(row.unit),
             ", \"baseline\": ", row.baseline.empty() ? "null" : JsonString(row.baseline),
             ", \"ratio\": ", row.ratio ? JsonNumber(*row.ratio) : "null");
  for (const Extra& extra : kExtras) {
    const std::optional<double>& value = row.*extra.field;
    if (value) Append(out, ", \"", extra.json, "\": ", JsonNumber(*value));
  }
  if (row.goal) {
    Append(out, ", \"goal\": ", JsonNumber(*row.goal),
           ", \"holds\": ", *row.Holds() ? "true" : "false");
  }
  return out + "}";
}

// `, "name": [...]`, or "" for an empty list.
template <typename Item, typename ToJson>
std::string JsonList(const char* name, const std::vector<Item>& items, const ToJson& to_json) {
  if (items.empty()) return "";
  std::string out;
  for (const Item& item : items) Append(out, out.empty() ? "" : ", ", to_json(item));
  return Concat(", \"", name, "\": [", out, "]");
}

}  // namespace

std::string Figure(double value) {
  const double magnitude = std::fabs(value);
  if (magnitude >= 100 || value == 0) return Fixed(value, 0);
  if (magnitude >= 10) return Fixed(value, 1);
  if (magnitude >= 1) return Fixed(value, 2);
  return Fixed(value, 3);
}

std::optional<bool> Row::Holds() const {
  if (!goal.has_value()) return std::nullopt;
  const double measured = goal_is_on_ratio && ratio.has_value() ? *ratio : value;
  return sense == Goal::kAtLeast ? measured >= *goal : measured <= *goal;
}

std::string Report::Text() const {
  std::string out = Concat("bench ", name, "   ", Machine(), "\n\n", TableOf(rows).Render());
  for (const bool goal : {true, false}) {
    bool first = true;
    for (const Finding& finding : findings) {
      if (finding.goal != goal) continue;
      Append(out, first ? (goal ? "\ngoals\n" : "\nalso measured\n") : "", "  ", finding.statement,
             ": ", finding.holds ? "yes" : "NO", " (", finding.figures, ")\n");
      first = false;
    }
  }
  if (!notes.empty()) out += "\n";
  for (const std::string& note : notes) Append(out, "  ", note, "\n");
  return out;
}

std::string Report::Json() const {
  std::string out =
      Concat("{\"name\": ", JsonString(name), ", \"machine\": ", JsonString(Machine()));
  if (rows.empty()) out += ", \"rows\": []";
  Append(out, JsonList("rows", rows, JsonOf),
         JsonList("findings", findings,
                  [](const Finding& finding) {
                    return Concat("{\"statement\": ", JsonString(finding.statement),
                                  ", \"goal\": ", finding.goal ? "true" : "false",
                                  ", \"holds\": ", finding.holds ? "true" : "false",
                                  ", \"figures\": ", JsonString(finding.figures), "}");
                  }),
         JsonList("notes", notes, JsonString));
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
