#include "client/eval/tally.h"

#include <algorithm>
#include <cmath>

namespace tessera::cli::eval {

namespace {

constexpr double kZ = 1.959963985;  // 95 % quantile, two-sided

}  // namespace

Interval WilsonInterval(std::uint32_t right, std::uint32_t samples) {
  if (samples == 0) return {};
  const double n = samples, share = right / n;
  const double middle = (share + kZ * kZ / (2 * n)) / (1 + kZ * kZ / n);
  const double half =
      kZ * std::sqrt(share * (1 - share) / n + kZ * kZ / (4 * n * n)) / (1 + kZ * kZ / n);
  // Exact ends: the formula gives 0 and 1 up to rounding.
  return {right == 0 ? 0 : middle - half, right == samples ? 1 : middle + half};
}

Interval DifferenceInterval(const Pairs& pairs) {
  if (pairs.samples == 0) return {.low = -1, .high = 1};
  const double n = pairs.samples + 2.0;
  const double gained = (pairs.gained + 1) / n, lost = (pairs.lost + 1) / n;
  const double middle = gained - lost;
  const double half = kZ * std::sqrt((gained + lost - middle * middle) / n);
  return {.low = std::max(middle - half, -1.0), .high = std::min(middle + half, 1.0)};
}

void Tally::Add(const Outcome& outcome) {
  right += outcome.right;
  samples += outcome.samples;
  bytes_ += outcome.bytes_kept * outcome.samples;
  step_ms_ += outcome.step_ms * outcome.samples;
}

Tally Results::Of(std::size_t policy, const std::function<bool(const Unit&)>& which) const {
  Tally tally;
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    if (finished_[unit].outcomes.empty() || !which(units_[unit])) continue;
    tally.Add(finished_[unit].outcomes[policy]);
  }
  return tally;
}

Pairs Results::PairsOf(std::size_t policy, std::size_t over,
                       const std::function<bool(const Unit&)>& which) const {
  Pairs pairs;
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    if (finished_[unit].outcomes.empty() || !which(units_[unit])) continue;
    const std::string& now = finished_[unit].outcomes[policy].marks;
    const std::string& before = finished_[unit].outcomes[over].marks;
    for (std::size_t i = 0; i < std::min(now.size(), before.size()); ++i) {
      if (now[i] == '-' || before[i] == '-') continue;
      ++pairs.samples;
      pairs.gained += now[i] == '1' && before[i] == '0';
      pairs.lost += now[i] == '0' && before[i] == '1';
    }
  }
  return pairs;
}

std::string Results::WhyRefused(std::size_t policy) const {
  return FirstText(policy, &Outcome::refused);
}

std::string Results::WhyNotPacked(std::size_t policy) const {
  return FirstText(policy, &Outcome::not_packed);
}

std::string Results::FirstText(std::size_t policy, std::string Outcome::*text) const {
  for (const FinishedUnit& finished : finished_) {
    if (!finished.outcomes.empty() && !(finished.outcomes[policy].*text).empty()) {
      return finished.outcomes[policy].*text;
    }
  }
  return "";
}

}  // namespace tessera::cli::eval
