#include "kernels/strategy/reorder.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "kernels/strategy/largest.h"

namespace tessera::kernels {
namespace {

using Pair = std::pair<std::uint16_t, std::uint16_t>;  // lower index first

// Pairs up 0 .. size - 1 (`size` is even) greedily by falling count; ties go to the lower pair. The
// result is sorted.
template <typename Count>
std::vector<Pair> PairUp(std::uint32_t size, const Count& count) {
  struct Edge {
    std::uint64_t count;
    Pair pair;
  };
  std::vector<Edge> edges;
  edges.reserve(std::size_t{size} * (size - 1) / 2);
  for (std::uint32_t a = 0; a < size; ++a) {
    for (std::uint32_t b = a + 1; b < size; ++b) {
      edges.push_back({count(a, b), {a, b}});
    }
  }
  std::sort(edges.begin(), edges.end(), [](const Edge& x, const Edge& y) {
    return x.count != y.count ? x.count > y.count : x.pair < y.pair;
  });
  std::vector<bool> taken(size);
  std::vector<Pair> pairs;
  for (const Edge& edge : edges) {
    const auto [a, b] = edge.pair;
    if (taken[a] || taken[b]) continue;
    taken[a] = taken[b] = true;
    pairs.push_back(edge.pair);
  }
  std::sort(pairs.begin(), pairs.end());
  return pairs;
}

}  // namespace

void KeptTogetherCounts::Add(const float* rotated, std::uint32_t kept) {
  std::int32_t magnitudes[kLargestHeadDim];
  std::uint16_t indices[kLargestHeadDim];
  for (std::uint32_t c = 0; c < channels_; ++c) {
    magnitudes[c] = std::bit_cast<std::int32_t>(std::fabs(rotated[c]));
  }
  IndicesOfLargest({.bits = magnitudes, .size = channels_}, kept, indices);
  for (std::uint32_t i = 0; i < kept; ++i) {
    std::uint32_t* const row = counts_.data() + std::size_t{indices[i]} * channels_;
    for (std::uint32_t j = i + 1; j < kept; ++j) ++row[indices[j]];
  }
}

ChannelOrder OrderByKeptTogether(const KeptTogetherCounts& together) {
  const std::vector<Pair> pairs =
      PairUp(together.channels(),
             [&](std::uint32_t a, std::uint32_t b) { return std::uint64_t{together.count(a, b)}; });
  const auto between = [&](std::uint32_t a, std::uint32_t b) {
    return std::uint64_t{together.count(pairs[a].first, pairs[b].first)} +
           together.count(pairs[a].first, pairs[b].second) +
           together.count(pairs[a].second, pairs[b].first) +
           together.count(pairs[a].second, pairs[b].second);
  };
  ChannelOrder order;
  for (const auto& [a, b] : PairUp(static_cast<std::uint32_t>(pairs.size()), between)) {
    for (const std::uint16_t pair : {a, b}) {
      order.push_back(pairs[pair].first);
      order.push_back(pairs[pair].second);
    }
  }
  return order;
}

}  // namespace tessera::kernels
