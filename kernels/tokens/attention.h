// What queries pay to the keys of a lane, through the implementation's `observe`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/format/layer_geometry.h"
#include "kernels/format/operations.h"

namespace tessera::kernels {

// Rows of head_dim elements of the layer's type, one after another.
struct RowRange {
  const std::byte* rows = nullptr;
  std::uint64_t count = 0;
};

// The entries that queries see, one range per query: [begin, end).
struct VisibleRanges {
  std::vector<std::uint64_t> begin;
  std::vector<std::uint64_t> end;
};
// Of queries at these positions over entries at those (both ascending): what is not younger than
// the query and, where the layer has a sliding window, within it.
VisibleRanges CausalRanges(std::span<const std::uint64_t> queries,
                           std::span<const std::uint64_t> entries, std::uint32_t sliding_window);
// All of them, for each query.
VisibleRanges FullRanges(std::uint64_t queries, std::uint64_t entries);

// Keeps its scratch memory from call to call.
class AttentionSums {
 public:
  AttentionSums(const Operations& operations, const LayerGeometry& geometry)
      : operations_(operations), geometry_(geometry) {}

  // sums[t] += over the queries, the share of its attention that each pays to key t.
  void AddShares(RowRange queries, RowRange keys, const VisibleRanges& visible,
                 std::span<double> sums);
  // sums[t] += over the queries, q . k_t, neither scaled nor capped.
  void AddLogits(RowRange queries, RowRange keys, const VisibleRanges& visible,
                 std::span<double> sums);

 private:
  void Add(bool logits, RowRange queries, RowRange keys, const VisibleRanges& visible,
           std::span<double> sums);

  const Operations& operations_;
  const LayerGeometry& geometry_;
  std::vector<float> scratch_;
};

// Of one query with these products q . k over all keys, which sees only the `seen` ones: the share
// it pays to each, times `weight`, is added to its sum. seen and sums go together.
void AddSharesAmong(std::span<const double> products, std::span<const std::uint32_t> seen,
                    const LayerGeometry& geometry, double weight, std::span<double> sums);

}  // namespace tessera::kernels
