// Distributions of the next token, given as logits.
#pragma once

#include <cstddef>
#include <span>

namespace tessera::cli::eval {

// The index of the largest logit.
std::size_t Likeliest(std::span<const float> logits);
// ln of the sum of exp.
double LogSum(std::span<const float> logits);
// KL divergence from the distribution of `exact` to that of `other`, in nats. The sums are
// LogSum's.
double Divergence(std::span<const float> exact, double exact_sum, std::span<const float> other,
                  double other_sum);

}  // namespace tessera::cli::eval
