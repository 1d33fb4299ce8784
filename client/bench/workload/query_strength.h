// How strongly a generated query must look at what it seeks.
#pragma once

#include <cstdint>
#include <vector>

namespace tessera::cli::bench {

// A part of a query: what a unit of it adds to each token's logit, whose share of the attention it
// is there for, and how large that is to be.
struct QueryPart {
  std::vector<double> logits;
  std::vector<std::uint32_t> sought;
  double mass = 0;
  double strength = 0;
};

// Sets the strengths so that each part gets its share beside `base`, the logits of what else the
// query asks. A share that no strength gives is approached as closely as one does.
void FindStrengths(const std::vector<double>& base, std::vector<QueryPart>& parts);

}  // namespace tessera::cli::bench
