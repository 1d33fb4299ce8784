// A KeyScorer over keys in host memory: the attention that queries pay to them.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "daemon/policies/key_scorer.h"
#include "kernels/tokens/channels.h"
#include "kernels/tokens/rows.h"

namespace tessera::policies {

class HostKeyScorer final : public KeyScorer {
 public:
  // `lanes` has one range per kv head. The operations and the rows must outlive the scorer.
  HostKeyScorer(const kernels::Operations& operations, const kernels::LayerGeometry& geometry,
                std::vector<kernels::RowRange> lanes, std::uint32_t observations_per_call = 1)
      : geometry_(geometry),
        lanes_(std::move(lanes)),
        sums_(operations, geometry),
        looks_at_once_(observations_per_call) {}

  // Succeeds for `calls` more calls; all later ones fail.
  void FailAfter(std::uint64_t calls) { left_ = calls; }
  std::uint64_t calls() const { return calls_; }

  absl::Status Look(std::uint32_t kv_head,
                    std::span<const kernels::KeyObservation> looks) override {
    if (absl::Status status = Enter(); !status.ok()) return status;
    for (const kernels::KeyObservation& look : looks) {
      EXPECT_EQ(kernels::ObservationProblem(look, lanes_[kv_head].count), "");
      sums_.Add(lanes_[kv_head], look);
    }
    return absl::OkStatus();
  }
  absl::Status AddSquaredLengths(std::uint32_t kv_head, std::span<double> sums) override {
    if (absl::Status status = Enter(); !status.ok()) return status;
    const kernels::RowRange& lane = lanes_[kv_head];
    EXPECT_LE(sums.size(), lane.count);
    const std::size_t row_bytes = geometry_.head_dim * kernels::ElementBytes(geometry_.type);
    for (std::size_t i = 0; i < sums.size(); ++i) {
      sums[i] +=
          kernels::SquaredLength(lane.rows + i * row_bytes, geometry_.head_dim, geometry_.type);
    }
    return absl::OkStatus();
  }
  absl::Status AddChannelSquares(std::uint32_t kv_head, std::uint64_t count,
                                 std::span<double> sums) override {
    if (absl::Status status = Enter(); !status.ok()) return status;
    EXPECT_LE(count, lanes_[kv_head].count);
    kernels::AddChannelSquares(lanes_[kv_head].rows, count, geometry_.head_dim, geometry_.type,
                               sums);
    return absl::OkStatus();
  }
  std::uint32_t observations_per_call() const override { return looks_at_once_; }

 private:
  absl::Status Enter() {
    if (calls_++ < left_) return absl::OkStatus();
    return absl::UnavailableError("the keys are gone");
  }

  const kernels::LayerGeometry geometry_;
  const std::vector<kernels::RowRange> lanes_;
  kernels::AttentionSums sums_;
  const std::uint32_t looks_at_once_;
  std::uint64_t calls_ = 0;
  std::uint64_t left_ = ~std::uint64_t{0};
};

}  // namespace tessera::policies
