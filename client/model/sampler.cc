#include "client/model/sampler.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace tessera::llm {

TokenId Sampler::Choose(std::span<const float> logits) {
  if (options_.temperature <= 0) {
    return static_cast<TokenId>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  }
  std::vector<TokenId> tokens(logits.size());
  std::iota(tokens.begin(), tokens.end(), 0);
  std::stable_sort(tokens.begin(), tokens.end(),
                   [&](TokenId a, TokenId b) { return logits[a] > logits[b]; });
  if (options_.top_k != 0 && options_.top_k < tokens.size()) tokens.resize(options_.top_k);

  std::vector<double> mass;  // cumulative
  double sum = 0;
  for (const TokenId token : tokens) {
    sum += std::exp((logits[token] - logits[tokens[0]]) / options_.temperature);
    mass.push_back(sum);
  }
  const double drawn = static_cast<double>(random_() >> 11) * 0x1p-53 * sum;
  const auto it = std::upper_bound(mass.begin(), mass.end(), drawn);
  return tokens[std::min<std::size_t>(it - mass.begin(), tokens.size() - 1)];
}

}  // namespace tessera::llm
