// Rows of a lane in host memory, for the time that a strategy is made from them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "daemon/cache/build.h"
#include "daemon/cache/recode.h"
#include "kernels/strategy/loss.h"

namespace tessera::compaction {

class HeldRows {
 public:
  // The rows of an open run, provisional ones from their raw copies, first to last. ABORTED where
  // raw copies were dropped meanwhile: without them the run is another.
  static absl::StatusOr<HeldRows> Of(const cache::TenantMemory& memory,
                                     const kernels::DenseTile& tile, const cache::OpenRun& run);
  // Of its plain part alone.
  static absl::StatusOr<HeldRows> OfPlain(const cache::TenantMemory& memory,
                                          const kernels::DenseTile& tile,
                                          const cache::OpenRun& run);

  std::uint64_t count() const { return count_; }
  kernels::LaneRows lane(std::uint64_t first, std::uint64_t count) const;
  cache::HostRows host(std::uint64_t first, std::uint64_t count) const;

 private:
  HeldRows(const kernels::DenseTile& tile, std::uint64_t count);
  absl::Status AddProvisional(const cache::OpenRun& run);
  absl::Status AddPlain(const cache::TenantMemory& memory, const cache::OpenRun& run);
  std::byte* keys() const { return bytes_.get(); }
  std::byte* values() const { return bytes_.get() + count_ * tile_.row_bytes(); }

  kernels::DenseTile tile_;
  std::uint64_t count_;
  std::uint64_t filled_ = 0;
  std::unique_ptr<std::byte[]> bytes_;  // all K rows, then all V rows
};

}  // namespace tessera::compaction
