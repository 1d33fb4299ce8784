#include "kernels/tokens/pool.h"

#include <algorithm>
#include <cstddef>
#include <numeric>

namespace tessera::kernels {
namespace {

// The scores at most `reach` away from the i-th.
std::span<const double> Around(std::span<const double> scores, std::size_t i, std::size_t reach) {
  const std::size_t begin = i - std::min(i, reach);
  const std::size_t end = std::min(scores.size(), i + reach + 1);
  return scores.subspan(begin, end - begin);
}

}  // namespace

std::vector<double> AveragePool(std::span<const double> scores, std::uint32_t width) {
  std::vector<double> pooled(scores.size());
  for (std::size_t i = 0; i < scores.size(); ++i) {
    const std::span<const double> near = Around(scores, i, width / 2);
    pooled[i] = std::accumulate(near.begin(), near.end(), 0.0) / width;
  }
  return pooled;
}

std::vector<double> LargestPool(std::span<const double> scores, std::uint32_t width) {
  std::vector<double> pooled(scores.size());
  for (std::size_t i = 0; i < scores.size(); ++i) {
    pooled[i] = std::ranges::max(Around(scores, i, width / 2));
  }
  return pooled;
}

}  // namespace tessera::kernels
