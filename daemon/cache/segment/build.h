// Builds tiles, tables and rotations before any reader can see them.
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

// Allocates memory for rotations, never at pool offset 0, which means "none" in a snapshot.
absl::StatusOr<pool::Block> AllocateRotations(const TenantMemory& memory, std::uint64_t bytes);
// Reserves room for R_k and R_v, each only if it is not null. At least one must be non-null.
absl::StatusOr<std::shared_ptr<const Rotations>> ReserveRotations(
    const TenantMemory& memory, const kernels::TileShape& shape,
    const kernels::RotationView& matrices);
// Writes rotations from host memory. INVALID_ARGUMENT if a value is not finite.
struct RotationStore {
  const Rotations* rotations;
  kernels::TileShape shape;
  kernels::RotationView matrices;  // for the same sides (K, V) as `rotations`
};
absl::Status StoreRotations(const TenantMemory& memory, std::span<const RotationStore> stores);

// Stores a book from host memory.
absl::StatusOr<std::shared_ptr<const Rotations>> StoreBook(const TenantMemory& memory,
                                                           std::span<const std::byte> book);

kernels::RotationView ViewOf(const Rotations* rotations, const kernels::TileShape& shape);

// Gives a segment without tiles the tiles for `entries`, and a table. The caller stores `words`,
// the contents of the table, before any reader sees the segment.
absl::Status ReserveTiles(const TenantMemory& memory, std::uint32_t entries, Segment& segment,
                          std::vector<device::WordStore>& words);
// Reserves additional tiles for a segment that has some; `words` as above.
absl::StatusOr<SegmentGrowth> ReserveGrowth(const TenantMemory& memory,
                                            const std::shared_ptr<Segment>& segment,
                                            std::size_t tiles,
                                            std::vector<device::WordStore>& words);

// Rows of a lane in host memory, K and V each [count][head_dim] of `type`.
struct HostRows {
  const std::byte* keys = nullptr;
  const std::byte* values = nullptr;
  std::uint64_t count = 0;
  kernels::DenseTile tile{};
  const float* weights = nullptr;            // [count]; null: all 1
  const std::uint32_t* positions = nullptr;  // [count], for shapes with positions
};
// The form in which tiles are written.
struct TileForm {
  kernels::TileShape shape;
  const Rotations* rotations = nullptr;
  device::ErrorLimits limits = {};
};
// Encodes rows into tiles of 32 rows; the last may be partial. A dense shape is a plain copy.
// Returns the first tile that cannot represent its rows: a value would not be finite, or an error
// is beyond the form's limits.
absl::StatusOr<std::optional<std::size_t>> EncodeRows(const TenantMemory& memory,
                                                      const TileForm& form, const HostRows& rows,
                                                      std::span<const device::TilePlace> tiles);

// Fills the tiles of a new segment with the given rows of tiles of the form `from`, as stored and
// in order. The two forms may differ only in weights and positions.
absl::Status GatherRows(const TenantMemory& memory, const kernels::TileShape& from,
                        std::span<const kernels::GatherRow> rows, const Segment& to);
// Copies the entries [first, end) to a new segment of the same form. `from` must have one entry per
// token.
absl::StatusOr<std::shared_ptr<Segment>> CopyEntries(const TenantMemory& memory,
                                                     const Segment& from, std::uint32_t first,
                                                     std::uint32_t end);

// Copies the rows that a lane shows of an unpacked segment to host memory.
absl::Status ReadDense(const TenantMemory& memory, const HeldSegment& held,
                       const kernels::DenseTile& tile, std::byte* keys, std::byte* values);

}  // namespace tessera::cache
