// Drops entries of a lane without encoding the others anew: rows go into new tiles as they are
// stored, packed or not. Segments that lose nothing stay as they are.
//
// Runs inside Sequence::Recode of the whole lane.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/cache/memory/tenant_memory.h"
#include "daemon/cache/segment/recode.h"
#include "daemon/policies/token_policy.h"

namespace tessera::compaction {

class LaneGather {
 public:
  LaneGather(const cache::TenantMemory& memory, const cache::OpenRun& run);

  // What the decision leaves of the first `decided` entries, and all of those behind them.
  absl::StatusOr<std::optional<cache::LaneSwap>> Keep(const policies::LaneDecision& decision,
                                                      std::uint64_t decided);

 private:
  // An entry on its way: of a segment of the run.
  struct Row {
    const cache::Segment* from;
    std::uint32_t entry;
  };

  // Rows of segments of one form become segments of that form.
  absl::Status Flush(std::vector<cache::HeldSegment>& held);
  absl::StatusOr<std::shared_ptr<cache::Segment>> NewSegment(std::size_t first, std::size_t count);
  absl::Status FillTiles(const cache::Segment& segment, std::size_t first, std::size_t count);

  const cache::TenantMemory& memory_;
  const std::vector<cache::HeldSegment> sources_;
  const cache::Segment* const growing_;   // that new tiles go into; null: none
  std::shared_ptr<cache::Segment> form_;  // of the rows that wait; null: none do
  std::vector<Row> rows_;
};

}  // namespace tessera::compaction
