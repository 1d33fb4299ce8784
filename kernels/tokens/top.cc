#include "kernels/tokens/top.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>

namespace tessera::kernels {
namespace {

// Ranks NaN below all numbers: NaN has no order, and sorting by it would be undefined.
struct Better {
  std::span<const double> scores;

  double Rank(std::uint32_t i) const {
    return std::isnan(scores[i]) ? -std::numeric_limits<double>::infinity() : scores[i];
  }
  bool operator()(std::uint32_t a, std::uint32_t b) const {
    const double rank_a = Rank(a);
    const double rank_b = Rank(b);
    return rank_a != rank_b ? rank_a > rank_b : a < b;
  }
};

std::vector<std::uint32_t> AllIndices(std::size_t count) {
  std::vector<std::uint32_t> indices(count);
  std::iota(indices.begin(), indices.end(), 0u);
  return indices;
}

}  // namespace

std::vector<std::uint32_t> TopIndices(std::span<const double> scores, std::uint64_t count) {
  std::vector<std::uint32_t> indices = AllIndices(scores.size());
  if (count >= indices.size()) return indices;
  const auto end = indices.begin() + static_cast<std::ptrdiff_t>(count);
  std::ranges::nth_element(indices, end, Better{scores});
  indices.erase(end, indices.end());
  std::ranges::sort(indices);
  return indices;
}

std::vector<std::uint32_t> ByFallingScore(std::span<const double> scores) {
  std::vector<std::uint32_t> indices = AllIndices(scores.size());
  std::ranges::sort(indices, Better{scores});
  return indices;
}

}  // namespace tessera::kernels
