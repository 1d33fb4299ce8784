// Computes the attention that queries pay to the keys of a lane, using the implementation's
// `observe`.
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

// Contiguous rows of head_dim elements of the layer's type.
struct RowRange {
  const std::byte* rows = nullptr;
  std::uint64_t count = 0;
};

// The entries visible to each query: [begin, end).
struct VisibleRanges {
  std::vector<std::uint64_t> begin;
  std::vector<std::uint64_t> end;
};
// Causal visibility for queries and entries at these positions (both ascending): entries not newer
// than the query and within the sliding window, if the layer has one.
VisibleRanges CausalRanges(std::span<const std::uint64_t> queries,
                           std::span<const std::uint64_t> entries, std::uint32_t sliding_window);
// Every query sees all entries.
VisibleRanges FullRanges(std::uint64_t queries, std::uint64_t entries);

// An observation: queries over the keys [first, first + sums.size()) of a lane.
struct KeyObservation {
  RowRange queries;  // in host memory
  // If set, the key at this index of the lane is the only query, and `queries` is ignored.
  std::optional<std::uint64_t> key;
  std::uint64_t first = 0;
  VisibleRanges visible;            // one range per query, relative to `first`
  std::vector<float> log2_weights;  // per key, from Log2Weights; empty: each key is one token
  // What is added to `sums`: each query's softmax share of the key; or, if set, the product q . k,
  // neither scaled nor capped.
  bool logits = false;
  std::span<double> sums;

  std::uint64_t query_count() const { return key.has_value() ? 1 : queries.count; }
};

// Empty if the observation fits a lane of `keys` keys, otherwise the reason. Computing functions do
// not check again.
std::string_view ObservationProblem(const KeyObservation& look, std::uint64_t keys);

// Observes keys in host memory. Reuses its scratch memory between calls.
class AttentionSums {
 public:
  AttentionSums(const Operations& operations, const LayerGeometry& geometry)
      : operations_(operations), geometry_(geometry) {}

  void Add(RowRange keys, const KeyObservation& look);

 private:
  const Operations& operations_;
  const LayerGeometry geometry_;
  std::vector<float> scratch_;
};

// The log2 weight of a key that stands for no token and receives no attention.
inline constexpr float kLog2ZeroWeight = -std::numeric_limits<float>::infinity();
// log2 of the number of tokens that each entry stands for, which attention adds to logits.
std::vector<float> Log2Weights(std::span<const float> weights);

// The products of one query with every key.
struct KeyProducts {
  std::span<const double> products;     // q . k per key
  std::span<const float> log2_weights;  // per key; empty: each key is one token
};

// For one query that sees only the keys `seen`: adds `part` times its softmax share of each to the
// corresponding element of `sums`.
void AddSharesOfVisible(const KeyProducts& keys, std::span<const std::uint32_t> seen,
                        const LayerGeometry& geometry, double part, std::span<double> sums);

}  // namespace tessera::kernels
