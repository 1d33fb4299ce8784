// Greedy seed clustering (SemantiCache): within a run of entries, in order, each that no cluster
// has yet begins one, and all later ones that are alike enough join it. Likeness is to the seed,
// never to a mean.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/policies/key_scorer.h"

namespace tessera::policies {

// Cosines of keys. Over several lanes of equal length: of the keys of all of them, joined.
class KeyCosines {
 public:
  // Of the first `entries` of these lanes. The scorer outlives it.
  static absl::StatusOr<KeyCosines> Of(KeyScorer& scorer, std::vector<std::uint32_t> kv_heads,
                                       std::uint64_t entries);

  // Of entry i with each of [i + 1, end), within [-1, 1]; 0 where one of both keys is zero. Valid
  // until the next call.
  absl::StatusOr<std::span<const double>> Row(std::uint64_t i, std::uint64_t end);

 private:
  KeyCosines(KeyScorer& scorer, std::vector<std::uint32_t> kv_heads, std::uint64_t entries)
      : scorer_(&scorer), kv_heads_(std::move(kv_heads)), lengths_(entries) {}
  // Of as many entries from i on as are looked up at once.
  absl::Status Compute(std::uint64_t i, std::uint64_t end);

  KeyScorer* scorer_;
  std::vector<std::uint32_t> kv_heads_;
  std::vector<double> lengths_;
  // Of entries from first_ on, each with those up to end_; and the looks that they came from.
  std::vector<std::vector<double>> rows_;
  std::vector<kernels::KeyLook> looks_;
  std::uint64_t first_ = 0;
  std::uint64_t end_ = 0;
};

// seed_of[i] for i in [begin, end): the first entry of its cluster. Two entries with a cosine above
// `tau`, not equal to it, may be in one.
absl::Status ClusterRun(KeyCosines& cosines, std::uint64_t begin, std::uint64_t end, double tau,
                        std::span<std::uint32_t> seed_of);

// How many clusters runs fall into, for each tau of a grid.
inline constexpr std::uint32_t kTauSteps = 128;  // tau = step / kTauSteps
class ClusterCounts {
 public:
  ClusterCounts() : counts_(kTauSteps + 1) {}

  absl::Status AddRun(KeyCosines& cosines, std::uint64_t begin, std::uint64_t end);
  void AddSingle(std::uint64_t entries);  // never merged

  std::span<const std::uint64_t> counts() const { return counts_; }  // [kTauSteps + 1]

 private:
  std::vector<std::uint64_t> counts_;
};

}  // namespace tessera::policies
