// A copy of a lane's rows in host memory, while a strategy is made from them or entries are
// dropped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/cache/segment/build.h"
#include "daemon/cache/segment/recode.h"
#include "daemon/compaction/lanes/rope_shift.h"
#include "daemon/policies/token_policy.h"
#include "kernels/strategy/loss.h"

namespace tessera::compaction {

class HostLaneRows {
 public:
  // Copies the rows of an open run: settled, then provisional (from raw copies), then dense ones.
  // ABORTED: raw copies were dropped meanwhile, so the run has changed. FAILED_PRECONDITION:
  // settled rows are packed.
  static absl::StatusOr<HostLaneRows> Of(const cache::TenantMemory& memory,
                                         const kernels::DenseTile& tile, const cache::OpenRun& run);
  // Copies the dense rows only.
  static absl::StatusOr<HostLaneRows> OfPlain(const cache::TenantMemory& memory,
                                              const kernels::DenseTile& tile,
                                              const cache::OpenRun& run);

  struct Turning {
    // Set if rotary positions are indices in the lane: keys are re-rotated to their new indices.
    const RopeShift* moved = nullptr;
    // Set if keys are merged in pre-RoPE space: members are rotated to the merged entry's position.
    const RopeShift* merged = nullptr;
  };
  // The rows that a decision about the first `decided` rows keeps, and all later rows.
  HostLaneRows After(const policies::LaneDecision& decision, std::uint64_t decided,
                     const Turning& turning) const;

  std::uint64_t count() const { return count_; }
  kernels::LaneRows lane(std::uint64_t first, std::uint64_t count) const;
  cache::HostRows host(std::uint64_t first, std::uint64_t count) const;
  std::span<const std::uint64_t> positions() const { return positions_; }
  std::span<const float> weights() const { return weights_; }  // empty: every weight is 1

  // The entry list for a segment of these rows; null if they are consecutive tokens of weight 1.
  std::shared_ptr<const cache::EntryList> EntryListOf(std::uint64_t first,
                                                      std::uint64_t count) const;

 private:
  HostLaneRows(const kernels::DenseTile& tile, std::uint64_t count);
  absl::Status AddProvisional(const cache::OpenRun& run);
  absl::Status AddDense(const cache::TenantMemory& memory,
                        const std::vector<cache::HeldSegment>& segments);
  void AddPositions(const cache::HeldSegment& held);
  // Overwrites row `to` with the mean of `members` of `from`, weighted by their tokens. `turner`
  // rotates each key to the position of `to` first; null: keys are averaged as they are.
  void Merge(const HostLaneRows& from, std::span<const std::uint32_t> members, std::uint64_t to,
             const RopeShift* turner);
  std::byte* keys() const { return bytes_.get(); }
  std::byte* values() const { return bytes_.get() + count_ * tile_.row_bytes(); }

  kernels::DenseTile tile_;
  std::uint64_t count_;
  std::uint64_t filled_ = 0;
  std::unique_ptr<std::byte[]> bytes_;  // all K rows, then all V rows
  std::vector<std::uint64_t> positions_;
  std::vector<float> weights_;
  std::uint64_t merged_until_ = 0;
};

}  // namespace tessera::compaction
