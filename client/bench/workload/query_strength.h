// Computes the strengths of a generated query's parts.
#pragma once

#include <cstdint>
#include <vector>

namespace tessera::cli::bench {

// A part of a query that seeks some tokens.
struct QueryPart {
  std::vector<double> logits;         // added to each token's logit, per unit of strength
  std::vector<std::uint32_t> sought;  // tokens
  double mass = 0;                    // their wanted share of the attention
  double strength = 0;                // result
};

// Sets the strengths so that each part's tokens get their share of the attention, given `base`, the
// logits of the rest of the query. A share that cannot be reached is approximated as closely as
// possible.
void FindStrengths(const std::vector<double>& base, std::vector<QueryPart>& parts);

}  // namespace tessera::cli::bench
