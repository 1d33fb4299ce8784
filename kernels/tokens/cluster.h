// Greedy seed clustering (SemantiCache): within a run of entries, in order, each that no cluster
// has yet begins one, and all later ones that are alike enough join it. Likeness is to the seed,
// never to a mean.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/format/layer_geometry.h"
#include "kernels/tokens/attention.h"

namespace tessera::kernels {

// Cosines of keys. Over several lanes of equal length: of the keys of all of them, joined.
class KeyCosines {
 public:
  KeyCosines(const Operations& operations, const LayerGeometry& geometry,
             std::span<const RowRange> lanes);

  // Of entry i with each of [i + 1, end), within [-1, 1]; 0 where one of both keys is zero. Valid
  // until the next call.
  std::span<const double> Of(std::uint64_t i, std::uint64_t end);

 private:
  AttentionSums sums_;
  std::vector<RowRange> lanes_;
  std::size_t row_bytes_;
  std::vector<double> lengths_;
  std::vector<double> row_;
};

// seed_of[i] for i in [begin, end): the first entry of its cluster. Two entries with a cosine above
// `tau`, not equal to it, may be in one.
void ClusterRun(KeyCosines& cosines, std::uint64_t begin, std::uint64_t end, double tau,
                std::span<std::uint32_t> seed_of);

// How many clusters runs fall into, for each tau of a grid.
inline constexpr std::uint32_t kTauSteps = 128;  // tau = step / kTauSteps
class ClusterCounts {
 public:
  ClusterCounts() : counts_(kTauSteps + 1) {}

  void AddRun(KeyCosines& cosines, std::uint64_t begin, std::uint64_t end);
  void AddSingle(std::uint64_t entries);  // never merged

  std::span<const std::uint64_t> counts() const { return counts_; }  // [kTauSteps + 1]

 private:
  std::vector<std::uint64_t> counts_;
};

}  // namespace tessera::kernels
