// Counts of right answers, and how sure they are.
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
// Wilson's score interval: where a share that was seen as `right` of `samples` may lie, with 95 %
// confidence. 0 to 1 where there are no samples.
Interval WilsonInterval(std::uint32_t right, std::uint32_t samples);

// Of the same samples, answered twice.
struct Pairs {
  std::uint32_t samples = 0;
  std::uint32_t gained = 0;  // wrong before, right now
  std::uint32_t lost = 0;    // the other way round

  double difference() const { return (static_cast<double>(gained) - lost) / samples; }
};
// Where the difference of the two shares of right answers may lie, with 95 % confidence: Bonett and
// Price's interval, Wald's with one sample more of each kind that differs. -1 to 1 where there are
// no samples.
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

// What is finished of a plan, which must outlive this.
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
  // Without outcomes where it is not finished.
  const FinishedUnit& finished(std::size_t unit) const { return finished_[unit]; }

  // Over the units that `which` takes.
  Tally Of(std::size_t policy, const std::function<bool(const Unit&)>& which) const;
  // Sample by sample, of those that both answered: what a policy gains over another.
  Pairs PairsOf(std::size_t policy, std::size_t over,
                const std::function<bool(const Unit&)>& which) const;
  // One reason, where a policy was refused in any unit; else empty.
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
