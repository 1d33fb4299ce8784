#include "client/tools/report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
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

// nullptr without an earlier run, or if that run has no such row.
const double* EarlierValue(const std::optional<EarlierRun>& earlier, const Row& row) {
  if (!earlier.has_value()) return nullptr;
  const auto it = earlier->values.find(row.name);
  return it == earlier->values.end() ? nullptr : &it->second;
}

// In percent of the earlier value. NaN: unknown.
double ChangePercent(double earlier, double value) {
  return earlier == value ? 0 : 100 * (value - earlier) / std::fabs(earlier);
}

std::string ChangeText(double earlier, double value) {
  const double change = ChangePercent(earlier, value);
  if (!std::isfinite(change)) return "-";
  return Concat(change > 0 ? "+" : "", Fixed(change, 1), " %");
}

// What a row with this unit is when it is better or worse than its baseline.
struct Words {
  const char* better;
  const char* worse;
};
Words WordsFor(const std::string& unit) {
  const std::string first = unit.substr(0, unit.find_first_of(" /"));
  if (unit.find("/s") != std::string::npos || first == "ns" || first == "us" || first == "ms" ||
      first == "s") {
    return {"faster", "slower"};
  }
  if (first == "B" || first == "KiB" || first == "MiB") return {"smaller", "larger"};
  return {"better", "worse"};
}

// Optional columns appear only if at least one row has the figure.
Table TableOf(const std::vector<Row>& rows, const std::optional<EarlierRun>& earlier) {
  std::vector<Table::Column> columns = {{"row", Align::kLeft}, {"value"}, {"unit", Align::kLeft}};
  if (earlier.has_value()) columns.insert(columns.end(), {{"earlier"}, {"change"}});
  for (const Extra& extra : kExtras) {
    if (Any(rows, extra.field)) columns.push_back({extra.title});
  }
  columns.insert(columns.end(), {{"baseline", Align::kLeft},
                                 {"ratio"},
                                 {"x baseline", Align::kLeft},
                                 {"goal", Align::kLeft},
                                 {"met", Align::kLeft}});
  Table table(columns);
  for (const Row& row : rows) {
    const std::optional<bool> holds = row.Holds();
    std::vector<std::string> cells = {row.name, std::isnan(row.value) ? "-" : Figure(row.value),
                                      row.unit};
    if (earlier.has_value()) {
      const double* const before = EarlierValue(earlier, row);
      const bool known = before != nullptr && std::isfinite(*before);
      cells.push_back(known ? Figure(*before) : "-");
      cells.push_back(known ? ChangeText(*before, row.value) : "-");
    }
    for (const Extra& extra : kExtras) {
      if (Any(rows, extra.field)) cells.push_back(Cell(row.*extra.field));
    }
    cells.push_back(row.baseline.empty() ? "-" : row.baseline);
    cells.push_back(Cell(row.ratio));
    cells.push_back(row.AgainstBaseline() + (row.ratio && row.paired ? " *" : ""));
    cells.push_back(row.GoalText());
    cells.push_back(holds ? (*holds ? "yes" : "NO") : "-");
    table.Add(std::move(cells));
  }
  return table;
}

// How to read the columns that are present.
std::string LegendOf(const std::vector<Row>& rows, const std::optional<EarlierRun>& earlier) {
  const auto any = [&rows](const auto& is) { return std::any_of(rows.begin(), rows.end(), is); };
  const auto has_ratio = [&](Goal sense) {
    return any([sense](const Row& row) { return row.ratio.has_value() && row.sense == sense; });
  };
  const bool up = has_ratio(Goal::kAtLeast);
  const bool down = has_ratio(Goal::kAtMost);
  std::string out;
  if (up && down) {
    out += "  ratio: x baseline says whether it is better or worse than the baseline\n";
  } else if (up || down) {
    Append(out, "  ratio: ", up ? "above" : "below", " 1 is better than the baseline; ",
           "x baseline says the same in words\n");
  }
  if (any([](const Row& row) { return row.ratio.has_value() && row.paired; })) {
    out +=
        "  *: the median of ratios within a round, both sides run one after another. The value is "
        "the\n"
        "     median over all rounds; the two can differ when the load of the machine changes\n";
  }
  if (any([](const Row& row) { return row.goal.has_value(); })) {
    out += "  goal: on the ratio or on the value, as it says. met: whether it is met\n";
  }
  if (earlier.has_value()) {
    Append(out, "  earlier, change: the value in ", earlier->source,
           " and the change since; better is down for\n"
           "     times, sizes and errors, and up for rates (per second)\n");
  }
  return out.empty() ? out : "\n" + out;
}

// At most four names.
std::string SomeOf(const std::vector<std::string>& names) {
  constexpr std::size_t kMost = 4;
  std::string out;
  for (std::size_t i = 0; i < std::min(names.size(), kMost); ++i) {
    Append(out, i == 0 ? "" : ", ", names[i]);
  }
  if (names.size() > kMost) Append(out, " and ", names.size() - kMost, " more");
  return out;
}

std::string JsonOf(const Row& row, const std::optional<EarlierRun>& earlier) {
  std::string out =
      Concat("{\"name\": ", JsonString(row.name), ", \"value\": ", JsonNumber(row.value),
             ", \"unit\": ", JsonString(row.unit),
             ", \"baseline\": ", row.baseline.empty() ? "null" : JsonString(row.baseline),
             ", \"ratio\": ", row.ratio ? JsonNumber(*row.ratio) : "null");
  for (const Extra& extra : kExtras) {
    const std::optional<double>& value = row.*extra.field;
    if (value) Append(out, ", \"", extra.json, "\": ", JsonNumber(*value));
  }
  if (const double* const before = EarlierValue(earlier, row); before != nullptr) {
    Append(out, ", \"earlier\": ", JsonNumber(*before),
           ", \"change_percent\": ", JsonNumber(ChangePercent(*before, row.value)));
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
  const double measured = JudgesRatio() ? *ratio : value;
  return sense == Goal::kAtLeast ? measured >= *goal : measured <= *goal;
}

std::string Row::AgainstBaseline() const {
  if (!ratio.has_value() || !std::isfinite(*ratio) || *ratio <= 0) return "-";
  const double gain = sense == Goal::kAtLeast ? *ratio : 1 / *ratio;
  const double times = std::max(gain, 1 / gain);
  if (times < 1.005) return "same";
  const Words words = WordsFor(unit);
  return Concat(Figure(times), "x ", gain > 1 ? words.better : words.worse);
}

std::string Row::GoalText() const {
  if (!goal.has_value()) return "-";
  const char* const limit = sense == Goal::kAtLeast ? " >= " : " <= ";
  if (JudgesRatio()) return Concat("ratio", limit, Figure(*goal));
  return Concat("value", limit, Figure(*goal), " ", unit);
}

std::vector<std::string> Report::Warnings() const {
  std::vector<std::string> warnings;
  const unsigned cpus = std::max(1u, std::thread::hardware_concurrency());
  if (load_average > cpus) {
    warnings.push_back(Concat("the machine was loaded before the run: load average ",
                              Figure(load_average), ", ", cpus,
                              " CPUs. Times may be too high; repeat the run on an idle machine"));
  }
  constexpr double kMostTail = 5;
  std::vector<std::string> tails;
  for (const Row& row : rows) {
    if (row.p50_ms && row.p99_ms && *row.p99_ms > kMostTail * *row.p50_ms) {
      tails.push_back(row.name);
    }
  }
  if (!tails.empty()) {
    warnings.push_back(Concat("p99 is more than ", kMostTail, " times p50 in ", SomeOf(tails),
                              ": other load may have disturbed the run"));
  }
  if (!earlier.has_value()) return warnings;
  if (earlier->machine != Machine()) {
    warnings.push_back(Concat(earlier->source, " is from another machine (", earlier->machine,
                              "): changes of times mean nothing"));
  }
  std::vector<std::string> missing;
  for (const auto& [name, value] : earlier->values) {
    if (std::none_of(rows.begin(), rows.end(),
                     [&name = name](const Row& row) { return row.name == name; })) {
      missing.push_back(name);
    }
  }
  if (!missing.empty()) {
    warnings.push_back(Concat("rows of ", earlier->source, " that this run lacks: ",
                              SomeOf(missing), ". Compare runs with the same flags"));
  }
  return warnings;
}

std::string Report::Text() const {
  std::string out = Concat("bench ", name, "   ", Machine(), "\n");
  for (const std::string& warning : Warnings()) Append(out, "warning: ", warning, "\n");
  Append(out, "\n", TableOf(rows, earlier).Render(), LegendOf(rows, earlier));
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
  Append(out, JsonList("rows", rows, [this](const Row& row) { return JsonOf(row, earlier); }),
         JsonList("warnings", Warnings(), JsonString),
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

double LoadAverage() {
  double minute = 0;
  return ::getloadavg(&minute, 1) == 1 ? minute : 0;
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
