// Counts of right answers and their confidence intervals.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "client/eval/plan.h"

namespace tessera::cli::eval {

struct Interval {
  double low = 0;
  double high = 1;
};
// Wilson's score interval: the 95 % confidence interval of the share `right` / `samples`. 0 to 1
// without samples.
Interval WilsonInterval(std::uint32_t right, std::uint32_t samples);

// The same samples answered under two policies.
struct Pairs {
  std::uint32_t samples = 0;
  std::uint32_t gained = 0;  // wrong under the baseline, right under the policy
  std::uint32_t lost = 0;    // right under the baseline, wrong under the policy

  double difference() const { return (static_cast<double>(gained) - lost) / samples; }
};
// The 95 % confidence interval of the difference of the two shares of right answers, after Bonett
// and Price: Wald's interval with one more gained and one more lost sample. -1 to 1 without
// samples.
Interval DifferenceInterval(const Pairs& pairs);

struct Tally {
  std::uint32_t right = 0;
  std::uint32_t samples = 0;

  void Add(const Outcome& outcome);
  bool empty() const { return samples == 0; }
  double accuracy() const { return static_cast<double>(right) / samples; }
  double bytes_kept() const { return bytes_ / samples; }
  double step_ms() const { return step_ms_ / samples; }

 private:
  double bytes_ = 0, step_ms_ = 0;  // times samples
};

// The finished units of a plan. The plan must outlive it.
class Results {
 public:
  explicit Results(const EvaluationPlan& plan)
      : plan_(plan), units_(UnitsOf(plan)), finished_(units_.size()) {}

  void Add(FinishedUnit finished) {
    const std::size_t unit = finished.unit;
    finished_.at(unit) = std::move(finished);
  }
  const EvaluationPlan& plan() const { return plan_; }
  const std::vector<Unit>& units() const { return units_; }
  // Has no outcomes if the unit is not finished.
  const FinishedUnit& finished(std::size_t unit) const { return finished_[unit]; }

  // Sums over the units for which `which` returns true.
  Tally Of(std::size_t policy, const std::function<bool(const Unit&)>& which) const;
  // Compares a policy with the baseline `over`, on samples that both answered.
  Pairs PairsOf(std::size_t policy, std::size_t over,
                const std::function<bool(const Unit&)>& which) const;
  // The reason of the policy's first refusal; empty if it was never refused.
  std::string WhyRefused(std::size_t policy) const;
  // The same where it packs, and has packed nothing.
  std::string WhyNotPacked(std::size_t policy) const;

 private:
  // Of the first unit where the policy has one.
  std::string FirstText(std::size_t policy, std::string Outcome::*text) const;

  const EvaluationPlan& plan_;
  const std::vector<Unit> units_;
  std::vector<FinishedUnit> finished_;
};

}  // namespace tessera::cli::eval
