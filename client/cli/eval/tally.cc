#include "client/cli/eval/tally.h"

#include <cmath>

namespace tessera::cli::eval {

Interval WilsonInterval(std::uint32_t right, std::uint32_t samples) {
  if (samples == 0) return {};
  constexpr double kZ = 1.959963985;  // of 95 %
  const double n = samples, share = right / n;
  const double middle = (share + kZ * kZ / (2 * n)) / (1 + kZ * kZ / n);
  const double half =
      kZ * std::sqrt(share * (1 - share) / n + kZ * kZ / (4 * n * n)) / (1 + kZ * kZ / n);
  // At the ends the formula gives 0 and 1 but for roundings.
  return {right == 0 ? 0 : middle - half, right == samples ? 1 : middle + half};
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

std::string Results::WhyRefused(std::size_t policy) const {
  for (const FinishedUnit& finished : finished_) {
    if (!finished.outcomes.empty() && !finished.outcomes[policy].refused.empty()) {
      return finished.outcomes[policy].refused;
    }
  }
  return "";
}

}  // namespace tessera::cli::eval
