// Greedy seed clustering of keys (SemantiCache). Entries of a range are visited in order. An entry
// without a cluster becomes the seed of a new one, and all later entries that are similar enough to
// the seed join it. Similarity is to the seed, never to a mean.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/policies/key_scorer.h"

namespace tessera::policies {

// Cosines of keys. With several lanes of equal length, an entry's key is the concatenation of its
// keys in all of them.
class KeyCosines {
 public:
  // Cosines of the first `entries` of these lanes. The scorer must outlive the result.
  static absl::StatusOr<KeyCosines> Of(KeyScorer& scorer, std::vector<std::uint32_t> kv_heads,
                                       std::uint64_t entries);

  // The cosines of entry i with each of [i + 1, end), in [-1, 1]; 0 if a key is zero. Valid until
  // the next call.
  absl::StatusOr<std::span<const double>> Row(std::uint64_t i, std::uint64_t end);

 private:
  KeyCosines(KeyScorer& scorer, std::vector<std::uint32_t> kv_heads, std::uint64_t entries)
      : scorer_(&scorer), kv_heads_(std::move(kv_heads)), lengths_(entries) {}
  // Computes the rows of as many entries from i on as one scorer call handles well.
  absl::Status Compute(std::uint64_t i, std::uint64_t end);

  KeyScorer* scorer_;
  std::vector<std::uint32_t> kv_heads_;
  std::vector<double> lengths_;
  // Rows of the entries from first_ on, each with the entries up to end_, and their looks.
  std::vector<std::vector<double>> rows_;
  std::vector<kernels::KeyObservation> looks_;
  std::uint64_t first_ = 0;
  std::uint64_t end_ = 0;
};

// Sets seed_of[i] for i in [begin, end) to the seed of i's cluster. An entry joins a seed if their
// cosine is greater than `tau`.
absl::Status ClusterRun(KeyCosines& cosines, std::uint64_t begin, std::uint64_t end, double tau,
                        std::span<std::uint32_t> seed_of);

// Counts the clusters of ranges of entries, for each tau of a grid.
inline constexpr std::uint32_t kTauSteps = 128;  // tau = step / kTauSteps
class ClusterCounts {
 public:
  ClusterCounts() : counts_(kTauSteps + 1) {}

  absl::Status AddRun(KeyCosines& cosines, std::uint64_t begin, std::uint64_t end);
  void AddSingle(std::uint64_t entries);  // entries that are never merged

  std::span<const std::uint64_t> counts() const { return counts_; }  // [kTauSteps + 1]

 private:
  std::vector<std::uint64_t> counts_;
};

}  // namespace tessera::policies
