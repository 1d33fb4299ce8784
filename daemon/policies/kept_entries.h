// What a policy that merges is shown where another one has said which tokens stay: those alone.
// What it decides is then said of all.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "daemon/policies/key_scorer.h"
#include "daemon/policies/token_policy.h"

namespace tessera::policies {

class StayingEntries {
 public:
  // Nothing of `stay` is merged. What the view points into outlives this.
  StayingEntries(const LayerView& view, const LayerDecision& stay);
  StayingEntries(const StayingEntries&) = delete;
  StayingEntries& operator=(const StayingEntries&) = delete;

  const LayerView& view() const { return view_; }
  // A decision about view(), of the entries that all of them are.
  LayerDecision InAll(LayerDecision decision) const;

 private:
  // Entries are counted among those that stay. Keys look at keys alone: what a query pays is said
  // of all that it sees.
  class Scorer final : public KeyScorer {
   public:
    Scorer(KeyScorer& all, std::span<const std::vector<std::uint32_t>> stay)
        : all_(all), stay_(stay) {}
    absl::Status Look(std::uint32_t kv_head, std::span<const kernels::KeyLook> looks) override;
    absl::Status AddSquaredLengths(std::uint32_t kv_head, std::span<double> sums) override;
    absl::Status AddChannelSquares(std::uint32_t kv_head, std::uint64_t count,
                                   std::span<double> sums) override;
    std::uint32_t looks_at_once() const override { return all_.looks_at_once(); }

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
