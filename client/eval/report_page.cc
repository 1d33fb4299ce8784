#include "client/eval/report_page.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <string_view>
#include <vector>

#include "client/eval/chart.h"
#include "client/eval/page_style.h"
#include "client/eval/result_table.h"
#include "client/tools/table.h"
#include "daemon/base/strings.h"

namespace tessera::cli::eval {

namespace {

// The share of the bytes that the sentence at the top of the page is about.
constexpr double kFewBytes = 0.35;
// A chart with fewer samples in a point shows mostly chance.
constexpr std::uint32_t kFewestSamples = 10;

std::vector<std::string> SplitAt(char separator, std::string_view text) {
  std::vector<std::string> parts;
  while (true) {
    const std::size_t end = std::min(text.find(separator), text.size());
    parts.emplace_back(Trim(text.substr(0, end)));
    if (end == text.size()) return parts;
    text.remove_prefix(end + 1);
  }
}

struct Term {
  std::string name;
  std::vector<std::string> options;
};
std::vector<Term> TermsOf(std::string_view policy) {
  std::vector<Term> terms;
  for (const std::string& term : SplitAt('+', policy)) {
    const std::size_t colon = std::min(term.find(':'), term.size());
    terms.push_back({.name = term.substr(0, colon)});
    if (colon < term.size()) terms.back().options = SplitAt(',', term.substr(colon + 1));
  }
  return terms;
}

// The terms of a policy without options: "chunkkv+mosaickv".
std::string Systems(const std::string& policy) {
  std::string names;
  for (const Term& term : TermsOf(policy)) Append(names, names.empty() ? "" : "+", term.name);
  return names;
}

// Policies that differ only in their budgets: one line in the charts.
struct Family {
  std::string text;
  std::string label;
  std::string colour;
  std::size_t marker = 0;
  std::vector<std::size_t> members;  // policies, by budget
};

// The terms, with the options that other families with the same terms lack.
std::string LabelOf(const std::string& policy, const std::vector<Family>& families) {
  const std::string systems = Systems(policy);
  std::size_t alike = 0;
  std::map<std::string, std::size_t> uses;  // by "term:option"
  for (const Family& family : families) {
    if (Systems(family.text) != systems) continue;
    ++alike;
    for (const Term& term : TermsOf(family.text)) {
      for (const std::string& option : term.options) ++uses[Concat(term.name, ":", option)];
    }
  }
  std::string label;
  for (const Term& term : TermsOf(policy)) {
    Append(label, label.empty() ? "" : "+", term.name);
    char before = ':';
    for (const std::string& option : term.options) {
      if (uses[Concat(term.name, ":", option)] == alike) continue;
      Append(label, before, option);
      before = ',';
    }
  }
  return label;
}

std::vector<Family> FamiliesOf(const EvaluationPlan& plan) {
  std::vector<Family> families;
  for (std::size_t i = 0; i < plan.policies.size(); ++i) {
    const std::string& text = plan.policies[i].text;
    const auto known = std::ranges::find(families, text, &Family::text);
    if (known != families.end()) {
      known->members.push_back(i);
      continue;
    }
    const std::size_t n = families.size();
    // Both lists are of twelve: the second dozen pairs colours with other markers.
    families.push_back({.text = text,
                        .colour = kColours[n % std::size(kColours)],
                        .marker = (n + n / std::size(kColours)) % kMarkers,
                        .members = {i}});
  }
  for (Family& family : families) family.label = LabelOf(family.text, families);
  return families;
}

std::string NoteOf(const std::string& policy, const Tally& tally) {
  return Concat(policy, ": ", tally.right, " of ", tally.samples, " right, ",
                Fixed(100 * tally.bytes_kept(), 1), " % of the bytes");
}

// The charts that are missing because a point has too few samples.
struct Omitted {
  std::vector<std::string> titles;
  std::uint32_t fewest = kFewestSamples;

  std::string Html() const {
    if (titles.empty()) return "";
    std::string names;
    for (const std::string& title : titles) {
      Append(names, names.empty() ? "" : "; ", Escaped(title));
    }
    return Concat("<p>Not drawn, because a point has fewer than ", kFewestSamples,
                  " samples (the fewest: ", fewest, "): ", names,
                  ". A larger --samples gives these charts.</p>\n");
  }
};

class Page {
 public:
  Page(const Results& results, const PageFacts& facts)
      : results_(results), plan_(results.plan()), facts_(facts), families_(FamiliesOf(plan_)) {}

  std::string Render() const {
    std::string html =
        Concat("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n",
               "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n",
               "<title>tessera eval</title>\n<style>", kPageStyle, "</style>\n</head>\n<body>\n",
               "<h1>Answers from a compressed KV cache, by policy</h1>\n");
    Append(html, Verdict(), Origin(), Facts(), Legend());
    for (const Question question : plan_.questions) {
      Append(html, "<h2>",
             question == Question::kBlind ? "Blind: the question follows compression"
                                          : "Seen: the question is compressed with the text",
             "</h2>\n<div class=\"charts\">\n", ByBytes(question));
      Omitted omitted;
      for (const std::optional<double>& budget : Budgets()) {
        Append(html, ByDepth(question, budget, omitted), ByLength(question, budget, omitted));
      }
      Append(html, "</div>\n", omitted.Html(), TableHtml(question));
    }
    return Concat(html, Refusals(), "</body>\n</html>\n");
  }

 private:
  // The best policy that keeps few bytes, and its distance from dense.
  std::string Verdict() const {
    std::string html = Concat("<p class=\"verdict\">Best policy at ", Fixed(100 * kFewBytes, 0),
                              " % of the bytes or less: ");
    for (const Question question : plan_.questions) {
      if (question != plan_.questions.front()) html += "; ";
      if (plan_.questions.size() > 1) Append(html, NameOf(question), ": ");
      const std::optional<std::size_t> best = BestWithin(results_, question, kFewBytes);
      if (!best) {
        html += "none";
        continue;
      }
      const Tally tally = Of(*best, question);
      Append(html, "<b>", Escaped(plan_.policies[*best].Name()), "</b> (",
             Fixed(100 * tally.bytes_kept(), 1), " % of the bytes, ",
             Fixed(100 * tally.accuracy(), 0), " % right), ", FromDense(*best, question));
    }
    return html + ".</p>\n";
  }

  // "2.1 points below dense (95 % CI -4.0 to -0.2)".
  std::string FromDense(std::size_t policy, Question question) const {
    const auto dense = std::ranges::find(plan_.policies, "dense", &PolicyAt::text);
    if (dense == plan_.policies.end()) return "not compared: the plan has no dense policy";
    const Pairs pairs = results_.PairsOf(policy, dense - plan_.policies.begin(),
                                         [&](const Unit& u) { return u.question == question; });
    if (pairs.samples == 0) return "not compared: no sample was answered by both it and dense";
    const Interval sure = DifferenceInterval(pairs);
    const std::string interval =
        Concat("95 % CI ", Fixed(100 * sure.low, 1), " to ", Fixed(100 * sure.high, 1));
    const double points = 100 * pairs.difference();
    if (sure.low <= 0 && sure.high >= 0) {
      return Concat("not separated from dense (", Fixed(points, 1), " points, ", interval, ")");
    }
    return Concat(Fixed(std::abs(points), 1), " points ", points < 0 ? "below" : "above",
                  " dense (", interval, ")");
  }

  // How to repeat the run.
  std::string Origin() const {
    std::string html;
    const auto add = [&](std::string_view before, const std::string& fact, std::string_view after) {
      if (fact.empty()) return;
      Append(html, html.empty() ? "" : " &#183; ", before, Escaped(fact), after);
    };
    add("tessera ", facts_.version, "");
    add("", facts_.date, "");
    add("model ", facts_.model, "");
    add("<code>", facts_.command, "</code>");
    return html.empty() ? "" : Concat("<p>", html, "</p>\n");
  }

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
        " per token of context; compressed sizes include rotations and tables. Error bars and "
        "intervals are of 95 %. They do not account for the choice of the best of many policies. "
        "Policies that were refused for some samples are neither best nor on the Pareto "
        "front.</p>\n");
  }

  std::string Legend() const {
    std::string html = "<ul class=\"legend\">\n";
    for (const Family& family : families_) {
      Append(html, "<li><svg viewBox=\"0 0 14 14\" fill=\"", family.colour, "\" stroke=\"",
             family.colour, "\">", MarkerSvg(family.marker, 7, 7, family.text), "</svg>",
             Escaped(family.label), "</li>\n");
    }
    return html + "</ul>\n";
  }

  Tally Of(std::size_t policy, Question question) const {
    return results_.Of(policy, [&](const Unit& unit) { return unit.question == question; });
  }

  // "chunkkv at 20 %".
  std::string Label(std::size_t policy) const {
    const PolicyAt& at = plan_.policies[policy];
    const auto family = std::ranges::find(families_, at.text, &Family::text);
    if (!at.budget) return family->label;
    return Concat(family->label, " at ", Percent(*at.budget));
  }

  static std::string Percent(double share) { return Concat(std::round(1e4 * share) / 100, " %"); }

  ChartPoint PointOf(std::size_t policy, double x, const Tally& tally) const {
    return {.x = x,
            .share = tally.accuracy(),
            .note = NoteOf(Label(policy), tally),
            .sure = WilsonInterval(tally.right, tally.samples)};
  }

  std::string ByBytes(Question question) const {
    Chart chart = {.title = "right answers by bytes kept", .x_title = "bytes kept"};
    double most = 1;
    for (const Family& family : families_) {
      ChartLine line = {
          .name = family.label, .colour = family.colour, .points = {}, .marker = family.marker};
      for (const std::size_t policy : family.members) {
        const Tally tally = Of(policy, question);
        if (tally.empty()) continue;
        most = std::max(most, tally.bytes_kept());
        line.points.push_back(PointOf(policy, tally.bytes_kept(), tally));
      }
      std::sort(line.points.begin(), line.points.end(),
                [](const ChartPoint& a, const ChartPoint& b) { return a.x < b.x; });
      chart.lines.push_back(std::move(line));
    }
    for (const double share : {0.0, 0.25, 0.5, 0.75, 1.0}) {
      chart.ticks.push_back({share, Fixed(100 * share, 0) + " %"});
    }
    if (most > 1) chart.ticks.push_back({most, ""});
    std::string names;
    for (const std::size_t policy : ParetoFront(results_, question)) {
      const Tally tally = Of(policy, question);
      chart.front.emplace_back(tally.bytes_kept(), tally.accuracy());
      Append(names, names.empty() ? "" : ", ", Label(policy));
    }
    if (!chart.front.empty()) {  // up to the right edge: no policy there answers more
      chart.front.emplace_back(chart.ticks.back().first, chart.front.back().second);
    }
    std::string html = Concat("<figure>", chart.Svg());
    if (!names.empty()) {
      Append(html, "<figcaption>Dashed: the Pareto front, policies that no other beats in bytes ",
             "and right answers: ", Escaped(names), ".</figcaption>");
    }
    return html + "</figure>\n";
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

  // One line for each policy with this budget, and for each policy without a budget. If a point has
  // too few samples there is no chart, and `omitted` says so.
  template <typename Value>
  std::string ByValue(Question question, const std::optional<double>& budget,
                      const std::string& what, const std::vector<Value>& values, Value Unit::*field,
                      Omitted& omitted) const {
    if (values.size() < 2) return "";  // one point per line: the table shows it
    Chart chart = {.title = Concat("right answers by ", what), .x_title = what};
    if (budget) Append(chart.title, ", budget ", Percent(*budget));
    chart.side_by_side = true;
    std::uint32_t fewest = kFewestSamples;
    std::vector<Value> sorted = values;
    std::sort(sorted.begin(), sorted.end());
    for (const Value value : sorted) {
      chart.ticks.push_back({static_cast<double>(value), Concat(value)});
    }
    for (const Family& family : families_) {
      for (const std::size_t policy : family.members) {
        const std::optional<double>& own = plan_.policies[policy].budget;
        if (own && own != budget) continue;
        ChartLine line = {
            .name = Label(policy), .colour = family.colour, .points = {}, .marker = family.marker};
        for (const Value value : sorted) {
          const Tally tally = results_.Of(policy, [&](const Unit& unit) {
            return unit.question == question && unit.*field == value;
          });
          if (tally.empty()) continue;
          fewest = std::min(fewest, tally.samples);
          line.points.push_back(PointOf(policy, static_cast<double>(value), tally));
        }
        if (!line.points.empty()) chart.lines.push_back(std::move(line));
      }
    }
    if (fewest < kFewestSamples) {
      omitted.titles.push_back(chart.title);
      omitted.fewest = std::min(omitted.fewest, fewest);
      return "";
    }
    return Concat("<figure>", chart.Svg(), "</figure>\n");
  }
  std::string ByDepth(Question question, const std::optional<double>& budget,
                      Omitted& omitted) const {
    return ByValue(question, budget, "depth", plan_.depths, &Unit::depth, omitted);
  }
  std::string ByLength(Question question, const std::optional<double>& budget,
                       Omitted& omitted) const {
    return ByValue(question, budget, "length", plan_.lengths, &Unit::length, omitted);
  }

  std::string TableHtml(Question question) const {
    const ResultTable table = TableOf(results_, question, facts_.dense_bytes_per_token);
    std::string html = "<div class=\"scroll\">\n<table>\n<thead><tr>";
    for (const std::string& title : table.titles) Append(html, "<th>", Escaped(title), "</th>");
    html += "</tr></thead>\n<tbody>\n";
    for (const std::vector<std::string>& row : table.rows) {
      html += "<tr>";
      for (const std::string& cell : row) Append(html, "<td>", Escaped(cell), "</td>");
      html += "</tr>\n";
    }
    html += "</tbody>\n</table>\n</div>\n";
    bool marked = false;
    for (std::size_t i = 0; i < plan_.policies.size(); ++i) {
      marked |= !results_.WhyNotPacked(i).empty();
    }
    if (!marked) return html;
    return html +
           "<p>* The policy left at least one sample dense: packing would not have saved "
           "bytes, or was not possible. Such rows show dense answers and bytes, in whole or "
           "in part. The reasons are at the end of the page.</p>\n";
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
