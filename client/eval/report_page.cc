#include "client/eval/report_page.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <vector>

#include "client/eval/chart.h"
#include "client/eval/result_table.h"
#include "client/tools/table.h"
#include "daemon/base/strings.h"

namespace tessera::cli::eval {

namespace {

constexpr const char* kColours[] = {"#1f77b4", "#d62728", "#2ca02c", "#9467bd",
                                    "#ff7f0e", "#17becf", "#8c564b", "#e377c2",
                                    "#7f7f7f", "#bcbd22", "#003f5c", "#7a5195"};

constexpr char kStyle[] =
    "body{font:15px/1.45 system-ui,sans-serif;max-width:1320px;margin:2em auto;padding:0 1em;"
    "color:#1a1a1a;background:#fff}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:13px}"
    "td,th{padding:2px 9px;text-align:right;border-bottom:1px solid #e4e4e4}"
    "td:first-child,th:first-child{text-align:left;font-family:ui-monospace,monospace}"
    ".charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(400px,1fr));gap:12px}"
    "svg text{font:11px system-ui,sans-serif;fill:#333;stroke:none}"
    ".grid{stroke:#e4e4e4}polyline{stroke-width:1.8}"
    ".legend{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:4px 18px}"
    ".legend b{display:inline-block;width:14px;height:4px;margin:0 6px 3px 0;"
    "vertical-align:middle}";

// The terms of a policy without options: "chunkkv+mosaickv".
std::string Systems(const std::string& policy) {
  std::string names;
  bool in_name = true;
  for (const char c : policy) {
    if (c == ':') in_name = false;
    if (c == '+') in_name = true;
    if (in_name && c != ' ') names += c;
  }
  return names;
}

// Policies that differ only in their budgets: one line in the charts.
struct Family {
  std::string name;
  std::string colour;
  std::vector<std::size_t> members;  // policies, by budget
};

std::vector<Family> FamiliesOf(const EvaluationPlan& plan) {
  std::vector<std::string> texts;
  std::vector<Family> families;
  std::map<std::string, int> names;
  for (std::size_t i = 0; i < plan.policies.size(); ++i) {
    const std::string& text = plan.policies[i].text;
    const auto known = std::find(texts.begin(), texts.end(), text);
    if (known != texts.end()) {
      families[known - texts.begin()].members.push_back(i);
      continue;
    }
    names[Systems(text)] += 1;
    families.push_back(
        {.name = text, .colour = kColours[texts.size() % std::size(kColours)], .members = {i}});
    texts.push_back(text);
  }
  for (Family& family : families) {
    if (names[Systems(family.name)] == 1) family.name = Systems(family.name);
  }
  return families;
}

std::string NoteOf(const std::string& policy, const Tally& tally) {
  return Concat(policy, ": ", tally.right, " of ", tally.samples, " right, ",
                Fixed(100 * tally.bytes_kept(), 1), " % of the bytes");
}

class Page {
 public:
  Page(const Results& results, const PageFacts& facts)
      : results_(results), plan_(results.plan()), facts_(facts), families_(FamiliesOf(plan_)) {}

  std::string Render() const {
    std::string html =
        Concat("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n",
               "<title>tessera eval</title>\n<style>", kStyle, "</style>\n</head>\n<body>\n",
               "<h1>Answers from a compressed KV cache, by policy</h1>\n");
    Append(html, Facts(), Legend());
    for (const Question question : plan_.questions) {
      Append(html, "<h2>",
             question == Question::kBlind ? "Blind: the question follows compression"
                                          : "Seen: the question is compressed with the text",
             "</h2>\n<div class=\"charts\">\n", ByBytes(question));
      for (const std::optional<double>& budget : Budgets()) {
        Append(html, ByDepth(question, budget), ByLength(question, budget));
      }
      Append(html, "</div>\n", TableHtml(question));
    }
    return Concat(html, Refusals(), "</body>\n</html>\n");
  }

 private:
  std::string Facts() const {
    std::string html = "<p>";
    for (const auto& [flag, value] : FlagsOf(plan_)) {
      if (flag == "policies" || flag == "batch") continue;
      Append(html, flag, " ", Escaped(value), " &#183; ");
    }
    const auto of_these = results_.units().size();
    std::size_t finished = 0;
    for (std::size_t i = 0; i < of_these; ++i) {
      finished += results_.finished(i).outcomes.empty() ? 0 : 1;
    }
    return Concat(
        html, Escaped(facts_.machine), "</p>\n<p>", finished, " of ", of_these,
        " units are finished. The recall model is a toy: 3.5 million weights, 4 layers, a "
        "vocabulary of 768 words, trained by this project for exactly these tasks; its "
        "figures rank policies and prove nothing about language models.</p>\n<p>An answer "
        "counts if every token is right. ",
        "Compare policies with the dense cache and at equal bytes. 100 % of the bytes are ",
        Fixed(facts_.dense_bytes_per_token, 0),
        " per token of context; compressed sizes include rotations and tables.</p>\n");
  }

  std::string Legend() const {
    std::string html = "<ul class=\"legend\">\n";
    for (const Family& family : families_) {
      Append(html, "<li><b style=\"background:", family.colour, "\"></b>", Escaped(family.name),
             "</li>\n");
    }
    return html + "</ul>\n";
  }

  std::string ByBytes(Question question) const {
    Chart chart = {.title = "right answers by bytes kept", .x_title = "bytes kept"};
    double most = 1;
    for (const Family& family : families_) {
      ChartLine line = {.name = family.name, .colour = family.colour};
      for (const std::size_t policy : family.members) {
        const Tally tally =
            results_.Of(policy, [&](const Unit& unit) { return unit.question == question; });
        if (tally.empty()) continue;
        most = std::max(most, tally.bytes_kept());
        line.points.push_back({.x = tally.bytes_kept(),
                               .share = tally.accuracy(),
                               .note = NoteOf(plan_.policies[policy].Name(), tally)});
      }
      std::sort(line.points.begin(), line.points.end(),
                [](const ChartPoint& a, const ChartPoint& b) { return a.x < b.x; });
      chart.lines.push_back(std::move(line));
    }
    for (const double share : {0.0, 0.25, 0.5, 0.75, 1.0}) {
      chart.ticks.push_back({share, Fixed(100 * share, 0) + " %"});
    }
    if (most > 1) chart.ticks.push_back({most, ""});
    return chart.Svg();
  }

  // The distinct budgets; a single nullopt if no policy has one.
  std::vector<std::optional<double>> Budgets() const {
    std::vector<std::optional<double>> budgets;
    for (const PolicyAt& policy : plan_.policies) {
      const bool known = std::find(budgets.begin(), budgets.end(), policy.budget) != budgets.end();
      if (policy.budget && !known) budgets.push_back(policy.budget);
    }
    if (budgets.empty()) budgets.push_back(std::nullopt);
    return budgets;
  }

  // One line for each policy with this budget, and for each policy without a budget.
  template <typename Value>
  std::string ByValue(Question question, const std::optional<double>& budget,
                      const std::string& what, const std::vector<Value>& values,
                      Value Unit::*field) const {
    if (values.size() < 2) return "";  // one point per line: the table shows it
    Chart chart = {.title = Concat("right answers by ", what), .x_title = what};
    if (budget) Append(chart.title, ", budget ", Fixed(100 * *budget, 0), " %");
    std::vector<Value> sorted = values;
    std::sort(sorted.begin(), sorted.end());
    for (const Value value : sorted) {
      chart.ticks.push_back({static_cast<double>(value), Concat(value)});
    }
    for (const Family& family : families_) {
      for (const std::size_t policy : family.members) {
        const std::optional<double>& own = plan_.policies[policy].budget;
        if (own && own != budget) continue;
        const std::string name = plan_.policies[policy].Name();
        ChartLine line = {.name = name, .colour = family.colour};
        for (const Value value : sorted) {
          const Tally tally = results_.Of(policy, [&](const Unit& unit) {
            return unit.question == question && unit.*field == value;
          });
          if (tally.empty()) continue;
          line.points.push_back({.x = static_cast<double>(value),
                                 .share = tally.accuracy(),
                                 .note = NoteOf(name, tally)});
        }
        chart.lines.push_back(std::move(line));
      }
    }
    return chart.Svg();
  }
  std::string ByDepth(Question question, const std::optional<double>& budget) const {
    return ByValue(question, budget, "depth", plan_.depths, &Unit::depth);
  }
  std::string ByLength(Question question, const std::optional<double>& budget) const {
    return ByValue(question, budget, "length", plan_.lengths, &Unit::length);
  }

  std::string TableHtml(Question question) const {
    const ResultTable table = TableOf(results_, question, facts_.dense_bytes_per_token);
    std::string html = "<table>\n<thead><tr>";
    for (const std::string& title : table.titles) Append(html, "<th>", Escaped(title), "</th>");
    html += "</tr></thead>\n<tbody>\n";
    for (const std::vector<std::string>& row : table.rows) {
      html += "<tr>";
      for (const std::string& cell : row) Append(html, "<td>", Escaped(cell), "</td>");
      html += "</tr>\n";
    }
    return html + "</tbody>\n</table>\n";
  }

  std::string Refusals() const {
    std::string html;
    for (std::size_t policy = 0; policy < plan_.policies.size(); ++policy) {
      const std::string dense = results_.WhyNotPacked(policy);
      if (!dense.empty()) {
        Append(html, "<p>* ", Escaped(plan_.policies[policy].Name()),
               " packed nothing, always or at times: ", Escaped(dense), "</p>\n");
      }
      const std::string why = results_.WhyRefused(policy);
      if (why.empty()) continue;
      Append(html, "<p>", Escaped(plan_.policies[policy].Name()),
             " was refused for at least one length: ", Escaped(why), "</p>\n");
    }
    return html;
  }

  const Results& results_;
  const EvaluationPlan& plan_;
  const PageFacts& facts_;
  const std::vector<Family> families_;
};

}  // namespace

std::string ReportPage(const Results& results, const PageFacts& facts) {
  return Page(results, facts).Render();
}

}  // namespace tessera::cli::eval
