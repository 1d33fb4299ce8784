// New tiles, tables and rotations, filled before anybody sees them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/cache/memory/tenant_memory.h"
#include "daemon/cache/segment/recode.h"
#include "daemon/cache/segment/segment.h"

namespace tessera::cache {

// Never at pool offset 0, which says "none" in a snapshot.
absl::StatusOr<pool::Block> AllocateRotations(const TenantMemory& memory, std::uint64_t bytes);
// Room for those of R_k and R_v that are not null. At least one is not.
absl::StatusOr<std::shared_ptr<const Rotations>> ReserveRotations(
    const TenantMemory& memory, const kernels::TileShape& shape,
    const kernels::RotationView& matrices);
// Writes them, from host memory. INVALID_ARGUMENT where a value is not finite.
struct RotationStore {
  const Rotations* rotations;
  kernels::TileShape shape;
  kernels::RotationView matrices;  // of the same sides
};
absl::Status StoreRotations(const TenantMemory& memory, std::span<const RotationStore> stores);

kernels::RotationView ViewOf(const Rotations* rotations, const kernels::TileShape& shape);

// Gives a segment without tiles those for `entries`, and its table. The words of the table are to
// be stored before anybody sees it.
absl::Status ReserveTiles(const TenantMemory& memory, std::uint32_t entries, Segment& segment,
                          std::vector<device::WordStore>& words);
// More tiles for one that has some. The same.
absl::StatusOr<SegmentGrowth> ReserveGrowth(const TenantMemory& memory,
                                            const std::shared_ptr<Segment>& segment,
                                            std::size_t tiles,
                                            std::vector<device::WordStore>& words);

// Rows of a lane in the daemon's own memory, K and V each [count][head_dim] of `type`.
struct HostRows {
  const std::byte* keys = nullptr;
  const std::byte* values = nullptr;
  std::uint64_t count = 0;
  kernels::DenseTile tile{};
  const float* weights = nullptr;            // [count]; null: 1
  const std::uint32_t* positions = nullptr;  // [count], of shapes that have them
};
// The form in which tiles are written, wherever the rows lie.
struct TileForm {
  kernels::TileShape shape;
  const Rotations* rotations = nullptr;
};
// Encodes rows into tiles, 32 each; the last may be partial. Where a plain shape is asked for, they
// are copied. Returns the first tile that cannot hold its rows, because a value is not finite
// there.
absl::StatusOr<std::optional<std::size_t>> EncodeRows(const TenantMemory& memory,
                                                      const TileForm& form, const HostRows& rows,
                                                      std::span<const device::TilePlace> tiles);

// Fills the tiles of a new segment with rows of tiles of the form `from`, as they are stored, in
// this order. The forms differ in weights and positions alone.
absl::Status GatherRows(const TenantMemory& memory, const kernels::TileShape& from,
                        std::span<const kernels::GatherRow> rows, const Segment& to);
// The entries [first, end) of a segment that has one for every token, as one of the same form.
absl::StatusOr<std::shared_ptr<Segment>> CopyEntries(const TenantMemory& memory,
                                                     const Segment& from, std::uint32_t first,
                                                     std::uint32_t end);

// Copies the rows that a lane shows of a segment that is not packed to host memory.
absl::Status ReadPlain(const TenantMemory& memory, const HeldSegment& held,
                       const kernels::DenseTile& tile, std::byte* keys, std::byte* values);

}  // namespace tessera::cache
