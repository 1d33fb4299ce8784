#include "client/bench/workload/query_strength.h"

#include <algorithm>
#include <cmath>

namespace tessera::cli::bench {

namespace {

double ShareOf(const std::vector<std::uint32_t>& tokens, const std::vector<double>& logits) {
  const double top = *std::max_element(logits.begin(), logits.end());
  double all = 0;
  for (const double logit : logits) all += std::exp(logit - top);
  double found = 0;
  for (const std::uint32_t token : tokens) found += std::exp(logits[token] - top);
  return found / all;
}

// The smallest strength that gives a part its share, given the logits of all other parts. If none
// does, the closest one.
double Strength(const std::vector<double>& others, const QueryPart& part) {
  constexpr double kLimit = 200;
  std::vector<double> logits(others.size());
  const auto share = [&](double strength) {
    for (std::size_t t = 0; t < logits.size(); ++t) {
      logits[t] = others[t] + strength * part.logits[t];
    }
    return ShareOf(part.sought, logits);
  };
  double high = 0;
  double best = 0;
  for (double strength = 0.5; strength < kLimit && best < part.mass; strength *= 1.25) {
    const double found = share(strength);
    if (found <= best) continue;
    best = found;
    high = strength;
  }
  if (best < part.mass) return high;
  double low = high / 1.25;
  for (int step = 0; step < 12; ++step) {
    const double middle = (low + high) / 2;
    (share(middle) < part.mass ? low : high) = middle;
  }
  return high;
}

std::vector<double> SumOf(const std::vector<double>& base, const std::vector<QueryPart>& parts,
                          const QueryPart* without) {
  std::vector<double> sum = base;
  for (const QueryPart& part : parts) {
    if (&part == without) continue;
    for (std::size_t t = 0; t < sum.size(); ++t) sum[t] += part.strength * part.logits[t];
  }
  return sum;
}

bool AllHaveTheirShares(const std::vector<double>& base, const std::vector<QueryPart>& parts) {
  const std::vector<double> logits = SumOf(base, parts, nullptr);
  return std::all_of(parts.begin(), parts.end(), [&](const QueryPart& part) {
    return std::fabs(ShareOf(part.sought, logits) - part.mass) < 0.01;
  });
}

}  // namespace

// Adjusts one part after another in several turns, since each part takes mass from the others.
void FindStrengths(const std::vector<double>& base, std::vector<QueryPart>& parts) {
  constexpr int kTurns = 20;
  for (int turn = 0; turn < kTurns && !AllHaveTheirShares(base, parts); ++turn) {
    for (QueryPart& part : parts) part.strength = Strength(SumOf(base, parts, &part), part);
  }
}

}  // namespace tessera::cli::bench
