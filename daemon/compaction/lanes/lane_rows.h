// Rows of a lane in host memory, for the time that it is decided what becomes of them.
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

class HeldRows {
 public:
  // The rows of an open run, settled ones first, provisional ones from their raw copies. ABORTED
  // where raw copies were dropped meanwhile: without them the run is another.
  // FAILED_PRECONDITION where settled rows are packed.
  static absl::StatusOr<HeldRows> Of(const cache::TenantMemory& memory,
                                     const kernels::DenseTile& tile, const cache::OpenRun& run);
  // Of its plain part alone.
  static absl::StatusOr<HeldRows> OfPlain(const cache::TenantMemory& memory,
                                          const kernels::DenseTile& tile,
                                          const cache::OpenRun& run);

  struct Turning {
    // Rows stand at rotary positions by their places in the lane, and are turned to those that they
    // get.
    const KeyTurner* moved = nullptr;
    // Keys are merged as they were before they were turned; the mean stands where the entry does.
    const KeyTurner* merged = nullptr;
  };
  // What a decision leaves of the first rows, and all of those behind them.
  HeldRows After(const policies::LaneDecision& decision, std::uint64_t decided,
                 const Turning& turning) const;

  std::uint64_t count() const { return count_; }
  kernels::LaneRows lane(std::uint64_t first, std::uint64_t count) const;
  cache::HostRows host(std::uint64_t first, std::uint64_t count) const;
  std::span<const std::uint64_t> positions() const { return positions_; }
  std::span<const float> weights() const { return weights_; }  // empty: 1

  // Of a segment made of these rows; null where they are tokens one after another.
  std::shared_ptr<const cache::EntryList> EntryListOf(std::uint64_t first,
                                                      std::uint64_t count) const;

 private:
  HeldRows(const kernels::DenseTile& tile, std::uint64_t count);
  absl::Status AddProvisional(const cache::OpenRun& run);
  absl::Status AddDense(const cache::TenantMemory& memory,
                        const std::vector<cache::HeldSegment>& segments);
  void AddPositions(const cache::HeldSegment& held);
  // Row `to`, in place, becomes the mean of entries of `from`, each as heavy as the tokens it
  // stands for. `turner`: of keys as they would be at its position; null: as they are.
  void Merge(const HeldRows& from, std::span<const std::uint32_t> members, std::uint64_t to,
             const KeyTurner* turner);
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
