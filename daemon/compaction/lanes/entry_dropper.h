// Drops entries of a lane without re-encoding the others: kept rows are copied to new tiles as they
// are stored, packed or dense. Segments that lose no entry are kept.
//
// Runs inside Sequence::Recode of the whole lane.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/cache/memory/tenant_memory.h"
#include "daemon/cache/segment/recode.h"
#include "daemon/policies/token_policy.h"

namespace tessera::compaction {

class EntryDropper {
 public:
  EntryDropper(const cache::TenantMemory& memory, const cache::OpenRun& run);

  // Keeps what the decision about the first `decided` entries keeps, and all later entries.
  absl::StatusOr<std::optional<cache::LaneSwap>> Keep(const policies::LaneDecision& decision,
                                                      std::uint64_t decided);

 private:
  // An entry to copy, of a segment of the run.
  struct Row {
    const cache::Segment* from;
    std::uint32_t entry;
  };

  absl::Status KeepPlain(std::span<const std::uint32_t> kept, std::uint64_t first,
                         std::uint64_t decided, std::vector<cache::HeldSegment>& to);
  // Copies the collected rows, which have one form, into new segments.
  absl::Status Flush(std::vector<cache::HeldSegment>& held);
  absl::StatusOr<std::shared_ptr<cache::Segment>> NewSegment(std::size_t first, std::size_t count);
  absl::Status FillTiles(const cache::Segment& segment, std::size_t first, std::size_t count);

  const cache::TenantMemory& memory_;
  const std::vector<cache::HeldSegment> settled_;
  const std::vector<cache::HeldSegment> plain_;
  const cache::Segment* const growing_;   // the segment that new tiles go into; may be null
  std::shared_ptr<cache::Segment> form_;  // has the form of the collected rows; null: no rows
  std::vector<Row> rows_;
};

}  // namespace tessera::compaction
