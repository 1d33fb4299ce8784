#include "client/eval/text/text_results.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>

namespace tessera::cli::eval {

namespace {

// 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom; then the normal one is close.
constexpr double kStudent[] = {12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306,
                               2.262,  2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
                               2.110,  2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064,
                               2.060,  2.056, 2.052, 2.048, 2.045, 2.042};

}  // namespace

std::optional<std::size_t> TextPlan::yardstick() const {
  for (std::size_t policy = 0; policy < policies.size(); ++policy) {
    if (IsYardstick(policy)) return policy;
  }
  return std::nullopt;
}

std::vector<TextUnit> UnitsOf(const TextPlan& plan) {
  std::vector<TextUnit> units;
  for (const std::uint32_t length : plan.lengths) {
    for (std::uint32_t text = 0; text < plan.texts; ++text) units.push_back({length, text});
  }
  return units;
}

Estimate EstimateOf(const std::vector<double>& values) {
  if (values.empty()) return {};
  const double n = static_cast<double>(values.size());
  const double mean = std::accumulate(values.begin(), values.end(), 0.0) / n;
  if (values.size() < 2) return {.mean = mean};
  double squares = 0;
  for (const double value : values) squares += (value - mean) * (value - mean);
  const std::size_t freedom = values.size() - 1;
  const double quantile = freedom <= std::size(kStudent) ? kStudent[freedom - 1] : 1.96;
  return {.mean = mean, .half = quantile * std::sqrt(squares / (n - 1) / n)};
}

TextFigures TextResults::Of(std::size_t policy, std::uint32_t length) const {
  TextFigures figures;
  figures.asked.assign(plan_.needles.size(), std::vector<Asked>(plan_.questions.size()));
  std::vector<double> differences;
  constexpr std::pair<double TextFigures::*, double TextOutcome::*> kMeans[] = {
      {&TextFigures::bytes_kept, &TextOutcome::bytes_kept},
      {&TextFigures::divergence, &TextOutcome::divergence},
      {&TextFigures::same_choice, &TextOutcome::same_choice},
      {&TextFigures::step_ms, &TextOutcome::step_ms},
      {&TextFigures::cache_ms, &TextOutcome::cache_ms},
      {&TextFigures::agreement, &TextOutcome::agreement},
      {&TextFigures::agreed_until, &TextOutcome::agreed_until},
      {&TextFigures::generated_divergence, &TextOutcome::generated_divergence}};
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    if (units_[unit].length != length || finished_[unit].outcomes.empty()) continue;
    const TextOutcome& outcome = finished_[unit].outcomes[policy];
    if (figures.refused.empty()) figures.refused = outcome.refused;
    if (figures.not_packed.empty()) figures.not_packed = outcome.not_packed;
    if (!outcome.refused.empty()) continue;
    ++figures.texts;
    differences.insert(differences.end(), outcome.differences.begin(), outcome.differences.end());
    for (const auto& [sum, value] : kMeans) figures.*sum += outcome.*value;
    for (std::size_t n = 0; n < outcome.asked.size(); ++n) {
      for (std::size_t q = 0; q < outcome.asked[n].size(); ++q) {
        figures.asked[n][q].Add(outcome.asked[n][q]);
      }
    }
  }
  for (const auto& [sum, value] : kMeans) figures.*sum /= std::max(1u, figures.texts);
  figures.difference = EstimateOf(differences);
  return figures;
}

}  // namespace tessera::cli::eval
