// What queries pay to the keys of a lane, through the implementation's `observe`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string_view>
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

// Queries that look at the keys [first, first + sums.size()) of a lane.
struct KeyLook {
  RowRange queries;  // in host memory
  // Instead of them: the key at this index of the lane is the one query.
  std::optional<std::uint64_t> key;
  std::uint64_t first = 0;
  VisibleRanges visible;            // one per query, counted from `first`
  std::vector<float> log2_weights;  // of each key, Log2Weights; empty: each is one token
  // What is added: the share of its attention that each query pays to the key; or the product
  // q . k, neither scaled nor capped.
  bool logits = false;
  std::span<double> sums;

  std::uint64_t query_count() const { return key.has_value() ? 1 : queries.count; }
};

// Empty, or what is wrong with a look at a lane of so many keys. Who computes does not look again.
std::string_view LookProblem(const KeyLook& look, std::uint64_t keys);

// Sums over keys in host memory. Keeps its scratch memory from call to call.
class AttentionSums {
 public:
  AttentionSums(const Operations& operations, const LayerGeometry& geometry)
      : operations_(operations), geometry_(geometry) {}

  void Add(RowRange keys, const KeyLook& look);

 private:
  const Operations& operations_;
  const LayerGeometry geometry_;
  std::vector<float> scratch_;
};

// Among log2_weights: of a key that stands for nothing, and is paid nothing.
inline constexpr float kLog2Nothing = -std::numeric_limits<float>::infinity();
// What attention adds to the logits of entries that stand for so many tokens each.
std::vector<float> Log2Weights(std::span<const float> weights);

// Keys that one query has been multiplied with.
struct KeyProducts {
  std::span<const double> products;     // q . k of every key
  std::span<const float> log2_weights;  // likewise; empty: each is one token
};

// Of one query that sees only the `seen` ones of these keys: the share it pays to each, times
// `part`, is added to its sum. seen and sums go together.
void AddSharesAmong(const KeyProducts& keys, std::span<const std::uint32_t> seen,
                    const LayerGeometry& geometry, double part, std::span<double> sums);

}  // namespace tessera::kernels
