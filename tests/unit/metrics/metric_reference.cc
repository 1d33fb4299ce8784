#include "tests/unit/metrics/metric_reference.h"

#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string_view>
#include <vector>

#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "daemon/metrics/names.h"

namespace tessera::metrics {
namespace {

using google::protobuf::Struct;

// The metrics and recorded series that a text of PromQL names.
std::set<std::string> NamesIn(const std::string& text) {
  static const std::regex kName("[a-zA-Z_:][a-zA-Z0-9_:]*");
  return {std::sregex_token_iterator(text.begin(), text.end(), kName), {}};
}

std::string Read(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<std::filesystem::path> FilesIn(const std::filesystem::path& folder,
                                           std::string_view extension) {
  std::vector<std::filesystem::path> files;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(folder, none)) {
    if (entry.path().extension() == extension) files.push_back(entry.path());
  }
  std::ranges::sort(files);
  return files;
}

// Who uses which names: alerts by name, recorded series by name, panels as "Dashboard: Panel".
struct Users {
  std::map<std::string, std::set<std::string>> alerts;
  std::map<std::string, std::set<std::string>> recorded;
  std::vector<std::pair<std::string, std::set<std::string>>> panels;  // in the dashboards' order
};

// The rules of a file, which names one alert or recorded series per "- alert:" or "- record:".
void AddRules(const std::filesystem::path& file, Users& users) {
  static const std::regex kRule("^ *- (alert|record): *(\\S+)");
  std::istringstream lines(Read(file));
  std::set<std::string>* names = nullptr;
  for (std::string line; std::getline(lines, line);) {
    std::smatch rule;
    if (std::regex_search(line, rule, kRule)) {
      names = &(rule[1] == "alert" ? users.alerts : users.recorded)[rule[2]];
    } else if (line.find("labels:") != std::string::npos ||
               line.find("annotations:") != std::string::npos) {
      names = nullptr;  // what follows is prose
    } else if (names != nullptr && line.find('#') == std::string::npos) {
      names->merge(NamesIn(line));
    }
  }
}

std::string StringOf(const Struct& object, const std::string& key) {
  const auto found = object.fields().find(key);
  return found == object.fields().end() ? std::string() : found->second.string_value();
}

void AddPanels(const std::string& dashboard, const Struct& object, Users& users) {
  const auto panels = object.fields().find("panels");
  if (panels == object.fields().end()) return;
  for (const google::protobuf::Value& value : panels->second.list_value().values()) {
    const Struct& panel = value.struct_value();
    std::set<std::string> names;
    if (const auto targets = panel.fields().find("targets"); targets != panel.fields().end()) {
      for (const google::protobuf::Value& target : targets->second.list_value().values()) {
        names.merge(NamesIn(StringOf(target.struct_value(), "expr")));
      }
    }
    const std::string title = StringOf(panel, "title");
    if (!names.empty()) users.panels.emplace_back(Concat(dashboard, ": ", title), names);
    AddPanels(dashboard, panel, users);  // panels of a collapsed row
  }
}

Users FindUsers(const std::filesystem::path& deploy) {
  Users users;
  for (const auto& file : FilesIn(deploy / "prometheus", ".yml")) AddRules(file, users);
  for (const auto& file : FilesIn(deploy / "grafana", ".json")) {
    Struct dashboard;
    const auto status = google::protobuf::util::JsonStringToMessage(Read(file), &dashboard);
    TESSERA_CHECK(status.ok(), Concat(file.string(), ": ", status.ToString()));
    const std::string title = StringOf(dashboard, "title");
    const std::size_t slash = title.rfind("/ ");  // "Tessera / Node"
    AddPanels(slash == std::string::npos ? title : title.substr(slash + 2), dashboard, users);
  }
  return users;
}

bool IsSeriesOf(const DescriptionView& metric, std::string_view name) {
  if (!name.starts_with(metric.name)) return false;
  const std::string_view suffix = name.substr(metric.name.size());
  return suffix.empty() || (metric.kind == Kind::kHistogram &&
                            (suffix == "_bucket" || suffix == "_sum" || suffix == "_count"));
}

// Directly, or through a recorded series.
bool Uses(const std::set<std::string>& names, const DescriptionView& metric, const Users& users) {
  return std::ranges::any_of(names, [&](const std::string& name) {
    if (IsSeriesOf(metric, name)) return true;
    const auto recorded = users.recorded.find(name);
    return recorded != users.recorded.end() && !recorded->second.contains(name) &&
           Uses(recorded->second, metric, users);
  });
}

std::string UsesOf(const DescriptionView& metric, const Users& users) {
  std::string text;
  for (const auto& [alert, names] : users.alerts) {
    if (Uses(names, metric, users)) Append(text, text.empty() ? "" : ", ", "**", alert, "**");
  }
  for (const auto& [panel, names] : users.panels) {
    if (Uses(names, metric, users)) Append(text, text.empty() ? "" : ", ", panel);
  }
  return text;
}

std::string_view TypeOf(Kind kind) {
  switch (kind) {
    case Kind::kCounter:
      return "counter";
    case Kind::kGauge:
      return "gauge";
    case Kind::kHistogram:
      return "histogram";
  }
  return "unknown";
}

}  // namespace

std::string MetricReference(const std::filesystem::path& deploy) {
  const Users users = FindUsers(deploy);
  std::string page =
      "# Metrics\n"
      "\n"
      "Every metric of `/metrics`, with its type and labels. Generated from the list in the code:\n"
      "do not edit. Units are base units: bytes and seconds. `_total` marks counters, which start\n"
      "at 0 when the daemon starts. All series exist from the start, except status codes other\n"
      "than OK, and the expiry of a certificate without TLS. An idle daemon has fewer than 300\n"
      "series, and each tenant adds 20: those with the label `tenant`. The last column names the\n"
      "alerts (bold) and the panels that use a metric.\n"
      "\n"
      "| metric | type | labels | meaning | used by |\n"
      "|---|---|---|---|---|\n";
  for (const DescriptionView& metric : AllMetrics()) {
    std::string labels;
    for (const std::string_view label : metric.labels) {
      Append(labels, labels.empty() ? "" : ", ", "`", label, "`");
    }
    Append(page, "| `", metric.name, "` | ", TypeOf(metric.kind), " | ", labels, " | ", metric.help,
           " | ", UsesOf(metric, users), " |\n");
  }
  return page;
}

}  // namespace tessera::metrics
