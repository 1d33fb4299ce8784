#include "client/eval/text/distribution.h"

#include <algorithm>
#include <cmath>

namespace tessera::cli::eval {

std::size_t Likeliest(std::span<const float> logits) {
  return static_cast<std::size_t>(std::ranges::max_element(logits) - logits.begin());
}

double LogSum(std::span<const float> logits) {
  const float most = *std::ranges::max_element(logits);
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - most);
  return most + std::log(sum);
}

double Divergence(std::span<const float> exact, double exact_sum, std::span<const float> other,
                  double other_sum) {
  double divergence = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    const auto log_share = static_cast<float>(exact[i] - exact_sum);
    if (log_share < -30) continue;  // below 1e-13 each
    divergence += std::exp(log_share) * (log_share - (other[i] - other_sum));
  }
  return divergence;
}

}  // namespace tessera::cli::eval
