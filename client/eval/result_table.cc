#include "client/eval/result_table.h"

#include "client/tools/table.h"
#include "daemon/base/strings.h"

namespace tessera::cli::eval {

namespace {

std::string Percent(const Tally& tally) {
  return tally.empty() ? "-" : Fixed(100 * tally.accuracy(), 0);
}

// Percentage points with the 95 % confidence interval.
std::string Difference(const Pairs& pairs) {
  if (pairs.samples == 0) return "-";
  const Interval sure = DifferenceInterval(pairs);
  return Concat(Fixed(100 * pairs.difference(), 1), " (", Fixed(100 * sure.low, 1), " to ",
                Fixed(100 * sure.high, 1), ")");
}

}  // namespace

ResultTable TableOf(const Results& results, Question question, double dense_bytes_per_token) {
  const EvaluationPlan& plan = results.plan();
  const bool timed = plan.batch == 1;
  const bool by_length = plan.lengths.size() > 1;
  ResultTable table = {.titles = {"policy", "bytes %", "B/token", "ratio"}};
  if (timed) table.titles.push_back("ms/step");
  table.titles.insert(table.titles.end(), plan.tasks.begin(), plan.tasks.end());
  for (std::size_t i = 0; by_length && i < plan.lengths.size(); ++i) {
    table.titles.push_back(Concat("at ", plan.lengths[i]));
  }
  table.titles.insert(table.titles.end(),
                      {"all", "95 % CI", Concat("vs ", plan.policies[0].Name())});
  for (std::size_t policy = 0; policy < plan.policies.size(); ++policy) {
    const Tally all = results.Of(policy, [&](const Unit& u) { return u.question == question; });
    const bool marked = !results.WhyNotPacked(policy).empty();
    std::vector<std::string> row = {Concat(plan.policies[policy].Name(), marked ? " *" : "")};
    const auto figure = [&](double value, int decimals) {
      row.push_back(all.empty() ? "-" : Fixed(value, decimals));
    };
    figure(100 * all.bytes_kept(), 1);
    figure(dense_bytes_per_token * all.bytes_kept(), 0);
    figure(1 / all.bytes_kept(), 2);
    if (timed) figure(all.step_ms(), 2);
    for (const std::string& task : plan.tasks) {
      row.push_back(Percent(results.Of(policy, [&](const Unit& unit) {
        return unit.question == question && unit.task == task;
      })));
    }
    for (std::size_t i = 0; by_length && i < plan.lengths.size(); ++i) {
      row.push_back(Percent(results.Of(policy, [&](const Unit& unit) {
        return unit.question == question && unit.length == plan.lengths[i];
      })));
    }
    const Interval sure = WilsonInterval(all.right, all.samples);
    row.push_back(Percent(all));
    row.push_back(
        all.empty() ? "-" : Concat(Fixed(100 * sure.low, 0), " to ", Fixed(100 * sure.high, 0)));
    row.push_back(policy == 0 ? "-" : Difference(results.PairsOf(policy, 0, [&](const Unit& u) {
      return u.question == question;
    })));
    table.rows.push_back(std::move(row));
  }
  return table;
}

}  // namespace tessera::cli::eval
