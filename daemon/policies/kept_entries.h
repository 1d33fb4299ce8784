// Restricts a LayerView to the entries that a token policy keeps, for a merging policy that runs
// after it, and translates the merging decision back to all entries.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "daemon/policies/key_scorer.h"
#include "daemon/policies/token_policy.h"

namespace tessera::policies {

class KeptEntries {
 public:
  // `stay` must not merge entries. The view's data must outlive this object.
  KeptEntries(const LayerView& view, const LayerDecision& stay);
  KeptEntries(const KeptEntries&) = delete;
  KeptEntries& operator=(const KeptEntries&) = delete;

  const LayerView& view() const { return view_; }
  // Translates a decision about view() to indices of all entries.
  LayerDecision ToAllEntries(LayerDecision decision) const;

 private:
  // Scores keys by their indices among the kept entries. Only products of keys with keys are
  // supported: a query's attention is a share among all entries that it sees.
  class Scorer final : public KeyScorer {
   public:
    Scorer(KeyScorer& all, std::span<const std::vector<std::uint32_t>> stay)
        : all_(all), stay_(stay) {}
    absl::Status Look(std::uint32_t kv_head,
                      std::span<const kernels::KeyObservation> looks) override;
    absl::Status AddSquaredLengths(std::uint32_t kv_head, std::span<double> sums) override;
    absl::Status AddChannelSquares(std::uint32_t kv_head, std::uint64_t count,
                                   std::span<double> sums) override;
    std::uint32_t observations_per_call() const override { return all_.observations_per_call(); }

   private:
    KeyScorer& all_;
    const std::span<const std::vector<std::uint32_t>> stay_;
  };

  std::vector<std::vector<std::uint32_t>> stay_;  // by kv head
  std::vector<std::vector<std::uint64_t>> positions_;
  std::vector<std::vector<float>> weights_;
  std::vector<LaneEntries> lanes_;
  Scorer scorer_;
  LayerView view_;
};

}  // namespace tessera::policies
