#include "client/eval/result_table.h"

#include <algorithm>
#include <string_view>
#include <utility>

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

// The first non-empty text of the policy in these units.
template <typename Which>
std::string FirstText(const Results& results, std::size_t policy, const Which& which,
                      std::string Outcome::*text) {
  for (std::size_t i = 0; i < results.units().size(); ++i) {
    const std::vector<Outcome>& outcomes = results.finished(i).outcomes;
    if (outcomes.empty() || !which(results.units()[i])) continue;
    if (!(outcomes[policy].*text).empty()) return outcomes[policy].*text;
  }
  return "";
}

// Quoted where RFC 4180 needs it.
std::string CsvCell(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted.append(c == '"' ? 2 : 1, c);
  return quoted + "\"";
}

// A policy that answered every sample of a question.
struct Complete {
  std::size_t policy = 0;
  double bytes = 0, right = 0;  // shares
};

std::vector<Complete> CompleteOf(const Results& results, Question question) {
  std::vector<Tally> tallies;
  std::uint32_t most = 1;
  for (std::size_t policy = 0; policy < results.plan().policies.size(); ++policy) {
    tallies.push_back(results.Of(policy, [&](const Unit& u) { return u.question == question; }));
    most = std::max(most, tallies.back().samples);
  }
  std::vector<Complete> complete;
  for (std::size_t policy = 0; policy < tallies.size(); ++policy) {
    const Tally& tally = tallies[policy];
    if (tally.samples != most) continue;
    complete.push_back({.policy = policy, .bytes = tally.bytes_kept(), .right = tally.accuracy()});
  }
  return complete;
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

std::string CsvOf(const Results& results, double dense_bytes_per_token) {
  const EvaluationPlan& plan = results.plan();
  std::string csv =
      "question,policy,budget,task,samples,right,share_right,low,high,bytes_kept,bytes_per_token,"
      "step_ms,difference,difference_low,difference_high,not_packed,refused\n";
  for (const Question question : plan.questions) {
    for (std::size_t policy = 0; policy < plan.policies.size(); ++policy) {
      for (const std::string& task : plan.tasks) {
        const auto here = [&](const Unit& unit) {
          return unit.question == question && unit.task == task;
        };
        const PolicyAt& at = plan.policies[policy];
        const Tally tally = results.Of(policy, here);
        Append(csv, NameOf(question), ",", CsvCell(at.Name()), ",",
               at.budget ? Concat(*at.budget) : "", ",", CsvCell(task), ",", tally.samples, ",",
               tally.right, ",");
        if (tally.empty()) {
          csv += ",,,,,,";
        } else {
          const Interval sure = WilsonInterval(tally.right, tally.samples);
          Append(csv, Fixed(tally.accuracy(), 4), ",", Fixed(sure.low, 4), ",", Fixed(sure.high, 4),
                 ",", Fixed(tally.bytes_kept(), 4), ",",
                 Fixed(dense_bytes_per_token * tally.bytes_kept(), 1), ",",
                 plan.batch == 1 ? Fixed(tally.step_ms(), 3) : "", ",");
        }
        const Pairs pairs = policy == 0 ? Pairs() : results.PairsOf(policy, 0, here);
        if (pairs.samples == 0) {
          csv += ",,,";
        } else {
          const Interval sure = DifferenceInterval(pairs);
          Append(csv, Fixed(pairs.difference(), 4), ",", Fixed(sure.low, 4), ",",
                 Fixed(sure.high, 4), ",");
        }
        Append(csv, CsvCell(FirstText(results, policy, here, &Outcome::not_packed)), ",",
               CsvCell(FirstText(results, policy, here, &Outcome::refused)), "\n");
      }
    }
  }
  return csv;
}

std::vector<std::size_t> ParetoFront(const Results& results, Question question) {
  std::vector<Complete> all = CompleteOf(results, question);
  std::ranges::stable_sort(all, {}, [](const Complete& c) { return std::pair(c.bytes, -c.right); });
  std::vector<std::size_t> front;
  for (const Complete& one : all) {
    const bool beaten = std::ranges::any_of(all, [&](const Complete& other) {
      return other.bytes <= one.bytes && other.right >= one.right &&
             (other.bytes < one.bytes || other.right > one.right);
    });
    if (!beaten) front.push_back(one.policy);
  }
  return front;
}

std::optional<std::size_t> BestWithin(const Results& results, Question question, double share) {
  std::vector<Complete> all = CompleteOf(results, question);
  std::erase_if(all, [&](const Complete& one) { return one.bytes > share; });
  if (all.empty()) return std::nullopt;
  return std::ranges::min_element(all, {},
                                  [](const Complete& c) { return std::pair(-c.right, c.bytes); })
      ->policy;
}

}  // namespace tessera::cli::eval
