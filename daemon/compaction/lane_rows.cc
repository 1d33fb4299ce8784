#include "daemon/compaction/lane_rows.h"

namespace tessera::compaction {

HeldRows::HeldRows(const kernels::DenseTile& tile, std::uint64_t count)
    : tile_(tile),
      count_(count),
      bytes_(std::make_unique_for_overwrite<std::byte[]>(2 * count * tile.row_bytes())) {}

absl::StatusOr<HeldRows> HeldRows::Of(const cache::TenantMemory& memory,
                                      const kernels::DenseTile& tile, const cache::OpenRun& run) {
  HeldRows rows(tile, run.provisional_entries() + run.plain_entries());
  if (absl::Status status = rows.AddProvisional(run); !status.ok()) return status;
  if (absl::Status status = rows.AddPlain(memory, run); !status.ok()) return status;
  return rows;
}

absl::StatusOr<HeldRows> HeldRows::OfPlain(const cache::TenantMemory& memory,
                                           const kernels::DenseTile& tile,
                                           const cache::OpenRun& run) {
  HeldRows rows(tile, run.plain_entries());
  if (absl::Status status = rows.AddPlain(memory, run); !status.ok()) return status;
  return rows;
}

absl::Status HeldRows::AddProvisional(const cache::OpenRun& run) {
  for (const cache::HeldSegment& held : run.provisional) {
    const std::size_t at = filled_ * tile_.row_bytes();
    if (!held.segment->raw()->CopyTo(held.entries, keys() + at, values() + at)) {
      return absl::AbortedError("raw copies of the rows were given up meanwhile");
    }
    filled_ += held.entries;
  }
  return absl::OkStatus();
}

absl::Status HeldRows::AddPlain(const cache::TenantMemory& memory, const cache::OpenRun& run) {
  for (const cache::HeldSegment& held : run.plain) {
    const std::size_t at = filled_ * tile_.row_bytes();
    absl::Status status = cache::ReadPlain(memory, held, tile_, keys() + at, values() + at);
    if (!status.ok()) return status;
    filled_ += held.entries;
  }
  return absl::OkStatus();
}

kernels::LaneRows HeldRows::lane(std::uint64_t first, std::uint64_t count) const {
  const cache::HostRows rows = host(first, count);
  return {.keys = {rows.keys, count, tile_.head_dim, tile_.type},
          .values = {rows.values, count, tile_.head_dim, tile_.type}};
}

cache::HostRows HeldRows::host(std::uint64_t first, std::uint64_t count) const {
  const std::size_t at = first * tile_.row_bytes();
  return {.keys = keys() + at, .values = values() + at, .count = count, .tile = tile_};
}

}  // namespace tessera::compaction
